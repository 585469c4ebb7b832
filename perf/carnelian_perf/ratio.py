"""Ratios of two measurements that ran in the same rounds, so that other load on the machine affects both alike."""

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Ratio(NamedTuple):
    """The ratio of two measurements, round by round: its median, least and greatest value."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float], others: Iterable[float]) -> "Ratio":
        """Divide `values` by `others` round by round; both have one number for each round, and at least one."""
        ratios = [value / max(other, 1e-9) for value, other in zip(values, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        """Format the ratio as in the pages: "1.50 (1.40 to 1.60)"."""
        return f"{self.median:.2f} ({self.least:.2f} to {self.greatest:.2f})"
