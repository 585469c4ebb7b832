"""The real Triton Inference Server without a container."""
