"""The real Triton Inference Server without a container."""

THREADS_VARIABLE = "CARNELIAN_THREADS"
"""The variable by which `--threads` reaches the Python-based backends: Triton gives them no `--backend-config`."""
METRICS_VARIABLE = "CARNELIAN_METRICS_URL"
"""The variable with the address where the backends read how many requests wait."""
