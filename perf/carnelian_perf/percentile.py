"""Percentiles of latencies, all of one definition."""

from collections.abc import Sequence

import numpy as np


def percentile(latencies: Sequence[float], percent: float) -> float:
    """The least of the latencies that `percent` % of them do not exceed; never one between two of them."""
    return float(np.percentile(latencies, percent, method="inverted_cdf"))
