"""Export a checkpoint to ONNX or TensorRT, as models of a Triton model repository."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime, whose wheels report to Microsoft from 1.30 on
