"""The raw file of a batching measurement: what was measured, on what, and every run of it."""

import statistics
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.raw_file import Filled, Record, Traffic
from carnelian_perf.traffic.batches import BatchedRun, Batches


@dataclass(frozen=True, kw_only=True)
class Run(BatchedRun):
    """One run of one candidate with one queue delay."""

    candidate: str
    queue_delay_ms: float
    feature_batches: dict[int, int]
    """Batch size -> number of executions of the feature stage, by Triton's statistics."""
    acoustic_compute_s: float
    """Seconds that the acoustic stage computed, by Triton's statistics."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf batching`."""

    subject: Literal["batching"] = "batching"
    concurrency: int
    traffic: Traffic
    candidates: dict[str, str]
    """Name -> title, in the order of the tables."""
    mismatches: list[str]
    """Clips whose transcript was not the same in every run; empty if all were."""
    runs: Filled[Run]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rounds of one candidate and queue delay: medians of the rounds, counts over all of them."""

    candidate: str
    queue_delay_ms: float
    clips_per_s: float
    audio_s_per_s: float
    latency_ms: list[float]
    """50th, 95th and 99th percentile of latency."""
    batches: Batches
    acoustic_ms_per_clip: float
    cpu_ms_per_clip: float


def summarise(measurement: Measurement) -> list[Summary]:
    """Summarise the runs, in the order of candidates and queue delays."""
    groups: dict[tuple[str, float], list[Run]] = {}
    for run in measurement.runs:
        groups.setdefault((run.candidate, run.queue_delay_ms), []).append(run)
    places = list(measurement.candidates)
    keys = sorted(groups, key=lambda key: (places.index(key[0]), key[1]))
    return [_summarise_group(candidate, delay, groups[candidate, delay]) for candidate, delay in keys]


def choose_best(summaries: list[Summary]) -> dict[str, Summary]:
    """Choose the queue delay with the highest throughput for each candidate: candidate -> its best summary."""
    best: dict[str, Summary] = {}
    for summary in summaries:
        if summary.candidate not in best or summary.clips_per_s > best[summary.candidate].clips_per_s:
            best[summary.candidate] = summary
    return best


def _summarise_group(candidate: str, queue_delay_ms: float, runs: list[Run]) -> Summary:
    return Summary(
        candidate=candidate,
        queue_delay_ms=queue_delay_ms,
        clips_per_s=statistics.median(run.clips_per_s for run in runs),
        audio_s_per_s=statistics.median(run.audio_s / run.wall_s for run in runs),
        latency_ms=[statistics.median(run.percentile_ms(percent) for run in runs) for percent in (50, 95, 99)],
        batches=Batches.of(runs),
        acoustic_ms_per_clip=1000 * statistics.median(run.acoustic_compute_s / len(run.latencies_s) for run in runs),
        cpu_ms_per_clip=statistics.median(run.cpu_ms_per_clip for run in runs),
    )
