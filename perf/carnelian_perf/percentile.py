"""Percentiles of latencies, by the same definition everywhere."""

from collections.abc import Sequence

import numpy as np


def percentile(latencies: Sequence[float], percent: float) -> float:
    """Return the least of the latencies that `percent` % of them do not exceed; it never interpolates between two."""
    return float(np.percentile(latencies, percent, method="inverted_cdf"))
