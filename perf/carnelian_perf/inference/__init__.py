"""Latency without a server: engines of PyTorch, ONNX Runtime and TensorRT in turns."""
