"""The real Triton Inference Server without a container."""

THREADS_VARIABLE = "CARNELIAN_THREADS"
"""How `--threads` reaches the Python-based backends: Triton hands them no `--backend-config`."""
METRICS_VARIABLE = "CARNELIAN_METRICS_URL"
"""Where the backends read how many requests wait."""
