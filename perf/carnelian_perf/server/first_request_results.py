"""The raw file of a measurement of a server's first requests, and what it says: is the first as fast as later ones?"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from carnelian_perf.raw_file import Record

SUBJECT = "first-request"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests of a fresh server, one after another; milliseconds of each, in the order in which they were sent."""

    duration_s: float
    """Of each clip."""
    round: int
    others_busy_cores: float
    """Cores that other processes kept busy just before the server was started."""
    client_ms: list[float]
    """From the call to its answer, as the client measures it."""
    ensemble_ms: list[float]
    """From arrival to answer, as Triton counts it."""
    stages_ms: dict[str, list[float]]
    """Stage -> queue, input, infer and output together, as Triton counts them."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    SUBJECT = SUBJECT

    subject: Literal["first-request"] = "first-request"
    speech: dict[str, Any]
    """Manifest and format of the clips, and how many there are of each duration."""
    requests: int
    """Of each server."""
    runs: list[Run]

    def durations_s(self) -> list[float]:
        """Ascending."""
        return sorted({run.duration_s for run in self.runs})

    def summarise(self, duration_s: float, times: Callable[[Run], list[float]]) -> "Summary":
        """The rounds of one duration, by one of the times that they hold."""
        found = [times(run) for run in self.runs if run.duration_s == duration_s]
        settled = [statistics.median(each[len(each) // 2 :]) for each in found]
        ratios = [each[0] / max(usual, 1e-9) for each, usual in zip(found, settled, strict=True)]
        return Summary(
            first_ms=statistics.median(each[0] for each in found),
            second_ms=statistics.median(each[1] for each in found),
            settled_ms=statistics.median(settled),
            ratio=(statistics.median(ratios), min(ratios), max(ratios)),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians of the rounds."""

    first_ms: float
    second_ms: float
    settled_ms: float
    """Of a round: the median of the last half of its requests."""
    ratio: tuple[float, float, float]
    """First over settled, round by round: the median, the least and the greatest."""
