"""The results of a measurement of memory: the raw file, whether memory grows, the page and its plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carnelian_perf.pages import page, show_plot, table, write_plot
from carnelian_perf.raw_file import Filled, Record, Traffic

SERVER = "tritonserver"
SETTLING_SHARE = 0.2
"""Share of the requests, at the start, that is not judged: allocators and queues grow to what the traffic needs."""
SETTLING_REQUESTS = 2000
"""Number of requests in which memory grows without a leak, too, as in `perf/results/quartznet_demo_memory.json`."""
FLAT_SHARE = 0.01
"""Memory is flat if both ends of the trend's interval, over all requests, are less than this share of the memory."""
CONFIDENCE = 0.95
MIB = 2**20


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


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each process."""
    first, last = measurement.samples[0], measurement.samples[-1]
    head = ["process", "at rest, RSS", "PSS", "USS", "at the end, RSS", "PSS", "USS"]
    head += ["bytes a request", "95 % interval", "verdict"]
    rows = [*(_row(measurement, name) for name in first.processes), _row_of_all(measurement)]
    too_short = (
        f" Too short: memory grows, but some samples are of the first {SETTLING_REQUESTS} requests, in which it grows "
        "without a leak, too."
    )
    notes = [
        "MiB. RSS, PSS, USS: resident, proportional and unique set size. Bytes a request: the trend of the unique set "
        f"(for all, of the summed PSS) over the {len(measurement.settled())} samples after the first "
        f"{SETTLING_SHARE:.0%} of the requests; the median slope between pairs of samples, with Sen's interval. Flat: "
        "the interval allows less than 1 % of change over all requests."
        + (too_short if any(row[-1] == "too short" for row in rows) else ""),
        f"Load: {last.requests} clips as files in {measurement.wall_s:.0f} s, {measurement.concurrency} clients; "
        f"samples are taken with none in flight. Clips: {measurement.traffic}.",
        f"Shared memory in /dev/shm: {first.shared_memory_bytes / MIB:.1f} MiB at rest, "
        f"{last.shared_memory_bytes / MIB:.1f} at the end.",
        f"Machine: {measurement.say_machine()}. Other processes kept {measurement.others_busy_cores} cores "
        "busy before.",
        *measurement.say_sources(raw_name),
    ]
    parts = [table(head, rows), show_plot("Memory over requests", raw_name)]
    return page(f"{measurement.model}: memory over {last.requests} requests", measurement, parts, notes)


def trend_of(measurement: Measurement, name: str | None = None) -> Trend:
    """Find the trend of a process's unique set size, in bytes per request; without a name, of all processes' PSS."""
    settled = measurement.settled()
    sizes = [sample.pss if name is None else sample.processes[name].uss for sample in settled]
    return find_trend([sample.requests for sample in settled], sizes)


def draw(measurement: Measurement, path: Path) -> None:
    """Plot the PSS of all processes over requests, and the change of each unique set since memory settled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    total, each = figure.subplots(1, 2)
    samples, settled = measurement.samples, measurement.settled()
    requests = [sample.requests for sample in samples]
    total.plot(requests, [sample.pss / MIB for sample in samples], color="#b3401f", label="PSS of all processes")
    total.plot(requests, [s.shared_memory_bytes / MIB for s in samples], color="#2f6f8f", label="/dev/shm")
    total.set(xlabel="requests", ylabel="MiB", ylim=(0, None))
    total.legend(fontsize=8)
    for name in samples[0].processes:
        start = settled[0].processes[name].uss
        each.plot(
            [s.requests for s in settled], [(s.processes[name].uss - start) / MIB for s in settled], label=name, lw=1
        )
    each.set(xlabel="requests", ylabel="MiB since it settled, unique set")
    figure.legend(*each.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(f"{measurement.model}: memory over requests", fontsize=11)
    write_plot(path, figure)


def _row(measurement: Measurement, name: str) -> list[str]:
    sizes = [
        getattr(sample.processes[name], kind) / MIB
        for sample in (measurement.samples[0], measurement.samples[-1])
        for kind in ("rss", "pss", "uss")
    ]
    return [name, *(f"{size:.1f}" for size in sizes), *_say(trend_of(measurement, name))]


def _row_of_all(measurement: Measurement) -> list[str]:
    ends: list[Sample] = [measurement.samples[0], measurement.samples[-1]]
    sums = [cell for sample in ends for cell in ("", f"**{sample.pss / MIB:.1f}**", "")]
    return ["**all**", *sums, *_say(trend_of(measurement))]


def _say(trend: Trend) -> list[str]:
    return [f"{trend.slope:.0f}", f"{trend.low:.0f} to {trend.high:.0f}", trend.verdict]
