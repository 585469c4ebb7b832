"""The raw file of a batching measurement: what was measured, on what, and every run of it."""

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.percentile import percentile
from carnelian_perf.raw_file import Filled, Record, Traffic


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one candidate with one queue delay."""

    candidate: str
    queue_delay_ms: float
    round: int
    others_busy_cores: float
    """Cores that other processes kept busy just before the run, the idle servers among them."""
    wall_s: float
    audio_s: float
    latencies_s: list[float]
    acoustic_batches: dict[int, int]
    """Batch size -> number of executions of the acoustic stage, by Triton's statistics."""
    feature_batches: dict[int, int]
    """Batch size -> number of executions of the feature stage, by Triton's statistics."""
    acoustic_compute_s: float
    """Seconds that the acoustic stage computed, by Triton's statistics."""
    server_cpu_s: float
    """CPU seconds of the server and its models, all cores together."""
    real_frames: int
    """Number of feature frames of the clips that were sent."""
    processed_frames: float
    """Number of frames that the acoustic network computed, padding included."""


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
    latency_ms: tuple[float, float, float]
    """50th, 95th and 99th percentile of latency."""
    acoustic_batches: dict[int, int]
    mean_batch: float
    acoustic_ms_per_clip: float
    cpu_ms_per_clip: float
    padding_ratio: float
    """Frames that the acoustic network computed for each frame of the clips."""


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
    batches: Counter[int] = Counter()
    for run in runs:
        batches.update(run.acoustic_batches)
    clips = sum(size * count for size, count in batches.items())
    p50, p95, p99 = (1000 * statistics.median(percentile(run.latencies_s, p) for run in runs) for p in (50, 95, 99))
    return Summary(
        candidate=candidate,
        queue_delay_ms=queue_delay_ms,
        clips_per_s=statistics.median(len(run.latencies_s) / run.wall_s for run in runs),
        audio_s_per_s=statistics.median(run.audio_s / run.wall_s for run in runs),
        latency_ms=(p50, p95, p99),
        acoustic_batches=dict(sorted(batches.items())),
        mean_batch=clips / sum(batches.values()),
        acoustic_ms_per_clip=1000 * statistics.median(run.acoustic_compute_s / len(run.latencies_s) for run in runs),
        cpu_ms_per_clip=1000 * statistics.median(run.server_cpu_s / len(run.latencies_s) for run in runs),
        padding_ratio=sum(run.processed_frames for run in runs) / sum(run.real_frames for run in runs),
    )
