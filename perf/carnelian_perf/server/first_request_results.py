"""The raw file of a measurement of a server's first requests, and its summary."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests of a fresh server; milliseconds of each, in the order in which they were sent.

    First come the requests in a row, then those after a rest each.
    """

    duration_s: float
    """Duration of each clip, in seconds."""
    round: int
    others_busy_cores: float
    """Cores that other processes kept busy just before the server was started."""
    client_ms: list[float]
    """Milliseconds from the call to its answer, as the client measures them."""
    ensemble_ms: list[float]
    """Milliseconds from arrival to answer, as Triton counts them."""
    stages_ms: dict[str, list[float]]
    """Stage -> milliseconds of queue, input, infer and output together, as Triton counts them."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf first-request`."""

    subject: Literal["first-request"] = "first-request"
    speech: Speech
    requests: int
    """Number of requests in a row to each server; those after a rest come on top."""
    rest_s: float
    """Seconds of rest before the first request, and before each request after the row."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """Return the durations of the clips in seconds, ascending."""
        return sorted({run.duration_s for run in self.runs})

    def summarise(self, rounds: Sequence[list[float]]) -> "Summary":
        """Summarise rounds of one duration, each given as the times of the client, the ensemble or a stage."""
        first = [times[0] for times in rounds]
        settled = [statistics.median(times[self.requests // 2 : self.requests]) for times in rounds]
        rested = [statistics.median(times[self.requests :]) for times in rounds]
        return Summary(
            first_ms=statistics.median(first),
            second_ms=statistics.median(times[1] for times in rounds),
            settled_ms=statistics.median(settled),
            rested_ms=statistics.median(rested),
            over_settled=Ratio.of(first, settled),
            over_rested=Ratio.of(first, rested),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The times of the first request and of later ones, as medians of the rounds."""

    first_ms: float
    second_ms: float
    settled_ms: float
    """Later requests: in each round, the median of the last half of the row."""
    rested_ms: float
    """Requests after a rest: in each round, their median."""
    over_settled: Ratio
    """The first request's time divided by that of later ones, round by round."""
    over_rested: Ratio
