"""Percentiles of latencies."""


def find_percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
