"""The raw file of a measurement of mixed traffic."""

import statistics
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.raw_file import Filled, Record, Traffic
from carnelian_perf.traffic.batches import BatchedRun, Batches


@dataclass(frozen=True, kw_only=True)
class Run(BatchedRun):
    """One run of one system at one rate."""

    system: str
    rate_per_s: float | None
    """Rate of Poisson arrivals in clips per second; None for a closed loop, which gives the capacity."""
    errors: list[str]


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf mixed`."""

    subject: Literal["mixed"] = "mixed"
    target_ms: float
    """Limit for the 95th percentile of latency, in milliseconds."""
    seconds: float
    """Seconds during which clips arrive in each run of an open loop, about."""
    traffic: Traffic
    systems: dict[str, str]
    """Name -> title, in the order of the tables."""
    mismatches: list[int]
    """Indices of the clips whose transcript was not the same in every run."""
    runs: Filled[Run]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of one system, as medians of the rounds."""

    system: str
    capacity_per_s: float
    """Throughput of the closed loop, in clips per second."""
    rate_per_s: float
    """The highest rate at which the 95th percentile met the target; 0 if none did."""
    is_least: bool
    """Whether every rate of the median round met the target, so that a higher rate may meet it, too."""
    rates_per_s: list[float]
    """The highest rate of each round at which the target was met; 0 if none did."""
    are_least: list[bool]
    """Of each round what `is_least` is of the median one."""
    latency_ms: list[float] | None
    """50th, 95th and 99th percentile of latency at `rate_per_s`, in the median round; None if none met it."""
    batches: Batches
    """The batches in the runs of `rates_per_s`; if there are none, in all open loops."""
    cpu_ms_per_clip: float
    """CPU milliseconds of the server and its models per clip, in the closed loops."""


def meets(run: Run, target_ms: float) -> bool:
    """Whether every clip was answered and the 95th percentile is within the target."""
    return not run.errors and bool(run.latencies_s) and run.percentile_ms(95) <= target_ms


def summarise(measurement: Measurement) -> list[Summary]:
    """Summarise the runs of each system, in the order of the systems."""
    return [_summarise(measurement, system) for system in measurement.systems]


def _summarise(measurement: Measurement, system: str) -> Summary:
    runs = [run for run in measurement.runs if run.system == system]
    opened = [run for run in runs if run.rate_per_s is not None]
    closed = [run for run in runs if run.rate_per_s is None]
    # Of each round the last: that at the highest rate.
    met = {run.round: run for run in sorted(opened, key=_rate_of) if meets(run, measurement.target_ms)}
    rates = {run.round: _rate_of(met[run.round]) if run.round in met else 0.0 for run in closed}
    middle = sorted(rates, key=lambda number: rates[number])[(len(rates) - 1) // 2]
    beyond = {run.round for run in opened if not meets(run, measurement.target_ms)}
    least = {number: number in met and number not in beyond for number in rates}
    return Summary(
        system=system,
        capacity_per_s=statistics.median(run.clips_per_s for run in closed),
        rate_per_s=rates[middle],
        is_least=least[middle],
        rates_per_s=[rates[number] for number in sorted(rates)],
        are_least=[least[number] for number in sorted(rates)],
        latency_ms=[met[middle].percentile_ms(percent) for percent in (50, 95, 99)] if middle in met else None,
        batches=Batches.of(list(met.values()) or opened),
        cpu_ms_per_clip=statistics.median(run.cpu_ms_per_clip for run in closed),
    )


def _rate_of(run: Run) -> float:
    return run.rate_per_s or 0.0
