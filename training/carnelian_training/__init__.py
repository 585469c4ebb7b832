"""CTC speech recogniser training: data, features, models, the loop, evaluation."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime: from 1.30 on, its wheels report to Microsoft
