"""The results of a measurement of batching: the raw file, with every run, its summary, the page and its plot."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carnelian_perf.pages import page, say_busy, show_plot, table, write_plot
from carnelian_perf.raw_file import Filled, Record, Traffic
from carnelian_perf.traffic.batches import BatchedRun, Batches


@dataclass(frozen=True, kw_only=True)
class Run(BatchedRun):
    """One run of one candidate with one queue delay."""

    candidate: str
    queue_delay_ms: float
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


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: the table, the plot, and what they were measured on."""
    runs = measurement.runs
    mismatches = f"NOT equal in every run: {'; '.join(measurement.mismatches)}" if measurement.mismatches else ""
    notes = [
        f"Load: {measurement.concurrency} closed-loop clients; {len(runs[0].latencies_s)} requests of one clip in "
        "each run, to the ensemble that takes audio files.",
        f"Clips: {measurement.traffic}.",
        f"Transcripts: {mismatches or 'equal in every run.'}",
        f"Machine: {measurement.say_machine()}. Other processes, idle servers among them, "
        f"{say_busy(run.others_busy_cores for run in runs)} before the runs.",
        *measurement.say_sources(raw_name),
    ]
    legend = f"""\
Bold: the queue delay, of the acoustic stage, that gave the highest throughput. Throughput, latency and times are
medians of {len({run.round for run in runs})} rounds; mean batch and padding are over all of them. Padding: frames that
the network computed for each frame of the clips, counted at its first convolution. Acoustic: time in that stage's
backend. CPU: of the whole server, all cores together; other programs on the machine change it least.
"""
    parts = [render_table(measurement), legend, show_plot("Batch sizes of the acoustic stage", raw_name)]
    return page(f"{measurement.model}: how batches form from clips of mixed length", measurement, parts, notes)


def render_table(measurement: Measurement) -> str:
    """The Markdown table, a row for each candidate and queue delay."""
    summaries = summarise(measurement)
    best = choose_best(summaries)
    head = ["batches form", "queue delay", "clips/s", "audio s/s", "p50 ms", "p95 ms", "p99 ms"]
    head += ["mean batch", "padding", "acoustic ms/clip", "CPU ms/clip"]
    return table(head, (_row(measurement, summary, summary is best[summary.candidate]) for summary in summaries))


def draw(measurement: Measurement, path: Path) -> None:
    """Plot the share of clips that went through the acoustic stage in a batch of each size."""
    from matplotlib.figure import Figure

    best = choose_best(summarise(measurement))
    figure = Figure(figsize=(8, 1.6 * len(best) + 0.8), layout="constrained")
    axes = figure.subplots(len(best), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, summary in zip(axes, best.values(), strict=True):
        axis.bar(list(summary.batches.sizes), summary.batches.percentages, color="#b3401f")
        axis.set_title(f"{measurement.candidates[summary.candidate]}, {summary.queue_delay_ms:g} ms", fontsize=9)
        axis.set_ylabel("% of clips")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("clips in the batch (acoustic stage)")
    figure.suptitle(f"{measurement.model}, {measurement.concurrency} clients, clips of mixed length", fontsize=10)
    write_plot(path, figure)


def _row(measurement: Measurement, summary: Summary, is_best: bool) -> list[str]:
    mark = "**" if is_best else ""
    return [
        f"{mark}{measurement.candidates[summary.candidate]}{mark}",
        f"{summary.queue_delay_ms:g} ms",
        f"{mark}{summary.clips_per_s:.1f}{mark}",
        f"{summary.audio_s_per_s:.0f}",
        *(f"{latency:.0f}" for latency in summary.latency_ms),
        f"{summary.batches.mean_size:.1f}",
        f"{summary.batches.padding_ratio:.2f}",
        f"{summary.acoustic_ms_per_clip:.0f}",
        f"{summary.cpu_ms_per_clip:.0f}",
    ]
