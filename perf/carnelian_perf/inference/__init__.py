"""Latency without a server: engines of PyTorch and ONNX Runtime in turns."""
