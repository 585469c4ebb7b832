"""The raw file of a measurement of memory, and what it says: how much, and whether it grows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.raw_file import Filled, Record, Traffic

SERVER = "tritonserver"
SETTLING_SHARE = 0.2
"""Of the requests, at the start: allocators and queues grow to what the traffic needs."""
FLAT_SHARE = 0.01
"""Memory is flat if the far end of the trend's interval is less of it than this, over all requests."""
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Process:
    """Of one process, in bytes, as the kernel accounts for it."""

    rss: int
    """Resident; what is shared counts in each process."""
    pss: int
    """Proportional: what is shared counts in parts, so that processes add up."""
    uss: int
    """Unique: what would be free without the process. A leak is in here."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server between two batches of requests, with none in flight."""

    requests: int
    """Answered so far."""
    processes: dict[str, Process]
    """Model instance, or :data:`SERVER`."""
    shared_memory_bytes: int
    """In /dev/shm; part of the processes' RSS and PSS."""

    @property
    def pss(self) -> int:
        """Of all processes."""
        return sum(process.pss for process in self.processes.values())


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    subject: Literal["memory"] = "memory"
    others_busy_cores: float
    """Cores that other processes kept busy before."""
    concurrency: int
    traffic: Traffic
    wall_s: float
    """Of the requests."""
    samples: Filled[Sample]
    """The first one at rest, before any request."""

    def settled(self) -> list[Sample]:
        """The samples after the first :data:`SETTLING_SHARE` of the requests."""
        start = SETTLING_SHARE * self.samples[-1].requests
        return [sample for sample in self.samples if sample.requests >= start]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Bytes for each request, with the interval of :data:`CONFIDENCE`, and what they come to over a run."""

    slope: float
    low: float
    high: float
    verdict: str
    """flat, grows, shrinks; or unclear, where the interval allows more than one."""


def find_trend(requests: Sequence[int], sizes: Sequence[int]) -> Trend:
    """Whether memory grows with requests.

    The slope is the median of those between all pairs of samples, its interval is that of Kendall's statistic (Sen,
    Journal of the American Statistical Association 63, 1968), so that a single sample or jump moves neither far.

    Args:
        requests: Answered so far, ascending, at least two.
        sizes: Bytes, one for each.

    Raises:
        ValueError: There are fewer.
    """
    count = len(requests)
    if count < 2:
        raise ValueError(
            f"a trend must be of at least two samples after the first {SETTLING_SHARE:.0%} of the requests, but there "
            f"is {count}: the measurement ended early; measure again"
        )
    slopes = sorted(
        (sizes[later] - sizes[earlier]) / (requests[later] - requests[earlier])
        for earlier in range(count)
        for later in range(earlier + 1, count)
    )
    deviation = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    reach = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation
    first = max(0, round((len(slopes) - reach) / 2) - 1)
    last = min(len(slopes) - 1, round((len(slopes) + reach) / 2))
    low, high = slopes[first], slopes[last]
    allowed = FLAT_SHARE * sizes[0] / requests[-1]
    if -allowed < low and high < allowed:
        verdict = "flat"
    elif low > 0:
        verdict = "grows"
    elif high < 0:
        verdict = "shrinks"
    else:
        verdict = "unclear"
    return Trend(slope=statistics.median(slopes), low=low, high=high, verdict=verdict)
