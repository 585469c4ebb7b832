"""Networks as ONNX graphs: ragged batches in, log-probabilities out, in float32, float16, bfloat16 and int8."""
