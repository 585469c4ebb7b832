"""The raw file of a measurement of memory, and what it says: how much, and whether it grows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.raw_file import Filled, Record, Traffic

SERVER = "tritonserver"
SETTLING_SHARE = 0.2
"""Share of the requests, at the start, that is not judged: allocators and queues grow to what the traffic needs."""
SETTLING_REQUESTS = 2000
"""Number of requests in which memory grows without a leak, too, as in `perf/results/quartznet_demo_memory.json`."""
FLAT_SHARE = 0.01
"""Memory is flat if both ends of the trend's interval, over all requests, are less than this share of the memory."""
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Process:
    """Memory of one process in bytes, as the Linux kernel accounts for it."""

    rss: int
    """Resident set size; shared memory counts fully in each process."""
    pss: int
    """Proportional set size; shared memory is divided among its processes, so that their sizes add up."""
    uss: int
    """Unique set size: what would be freed if the process ended. A leak shows here."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The memory of a server between two series of requests, with none in flight."""

    requests: int
    """Number of requests answered so far."""
    processes: dict[str, Process]
    """Process -> its memory; a process is called after its model instance, the server :data:`SERVER`."""
    shared_memory_bytes: int
    """Bytes in /dev/shm, which are also part of the processes' RSS and PSS."""

    @property
    def pss(self) -> int:
        """The summed proportional set size of all processes, in bytes."""
        return sum(process.pss for process in self.processes.values())


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf memory`."""

    subject: Literal["memory"] = "memory"
    others_busy_cores: float
    """Cores that other processes kept busy before the measurement."""
    concurrency: int
    traffic: Traffic
    wall_s: float
    """Seconds that the requests took."""
    samples: Filled[Sample]
    """The samples in order; the first one is taken at rest, before any request."""

    def settled(self) -> list[Sample]:
        """Return the samples after the first :data:`SETTLING_SHARE` of the requests."""
        start = SETTLING_SHARE * self.samples[-1].requests
        return [sample for sample in self.samples if sample.requests >= start]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The growth of memory in bytes per request, with its interval at :data:`CONFIDENCE`, and a verdict."""

    slope: float
    low: float
    high: float
    verdict: str
    """`flat`, `grows` or `shrinks`; `unclear` if the interval allows more than one; `too short` if it grows, but
    the first sample is within :data:`SETTLING_REQUESTS`, so that it may without a leak."""


def find_trend(requests: Sequence[int], sizes: Sequence[int]) -> Trend:
    """Find whether memory grows with the number of requests, by Sen's slope.

    The slope is the median of the slopes between all pairs of samples; its interval is that of Kendall's statistic
    (Sen, Journal of the American Statistical Association 63, 1968). A single sample or jump moves neither far.

    Args:
        requests: Number of requests answered at each sample, ascending; at least two samples.
        sizes: Bytes at each sample.

    Raises:
        ValueError: There are fewer than two samples.
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
        verdict = "grows" if requests[0] >= SETTLING_REQUESTS else "too short"
    elif high < 0:
        verdict = "shrinks"
    else:
        verdict = "unclear"
    return Trend(slope=statistics.median(slopes), low=low, high=high, verdict=verdict)
