"""Measurements of a Carnelian server, of inference without one, and of training."""

import os

# Set before onnxruntime is imported: from 1.30 on, its wheels send telemetry to Microsoft.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
