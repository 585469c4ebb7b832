"""Checkpoint to ONNX to a Triton model repository."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime, whose wheels report to Microsoft from 1.30 on
