"""One measurement over another, in rounds: whatever else the machine did met both of the same round."""

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Ratio(NamedTuple):
    """Of two measurements, round by round."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float], others: Iterable[float]) -> "Ratio":
        """The first over the second; one of each for each round, and at least one."""
        ratios = [value / max(other, 1e-9) for value, other in zip(values, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        """As the pages show it."""
        return f"{self.median:.2f} ({self.least:.2f} to {self.greatest:.2f})"
