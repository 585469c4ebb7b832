"""The raw file of a measurement of a server's first requests, and what it says: is the first as fast as later ones?"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests of a fresh server; milliseconds of each, in the order in which they were sent.

    First those in a row, then those after a rest each.
    """

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

    subject: Literal["first-request"] = "first-request"
    speech: Speech
    requests: int
    """Of each server, in a row."""
    rest_s: float
    """Before the first request, and before each after the row."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """Ascending."""
        return sorted({run.duration_s for run in self.runs})

    def summarise(self, duration_s: float, times: Callable[[Run], list[float]]) -> "Summary":
        """The rounds of one duration, by one of the times that they hold."""
        found = [times(run) for run in self.runs if run.duration_s == duration_s]
        first = [each[0] for each in found]
        settled = [statistics.median(each[self.requests // 2 : self.requests]) for each in found]
        rested = [statistics.median(each[self.requests :]) for each in found]
        return Summary(
            first_ms=statistics.median(first),
            second_ms=statistics.median(each[1] for each in found),
            settled_ms=statistics.median(settled),
            rested_ms=statistics.median(rested),
            over_settled=Ratio.of(first, settled),
            over_rested=Ratio.of(first, rested),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians of the rounds."""

    first_ms: float
    second_ms: float
    settled_ms: float
    """Of a round: the median of the last half of the row."""
    rested_ms: float
    """Of a round: the median of the requests after a rest."""
    over_settled: Ratio
    """First over settled."""
    over_rested: Ratio
