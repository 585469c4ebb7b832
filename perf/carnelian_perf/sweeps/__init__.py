"""Latency of a server over a grid of batches, durations and loads, by Triton's perf_analyzer."""
