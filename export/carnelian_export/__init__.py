"""Checkpoint to ONNX to a Triton model repository."""
