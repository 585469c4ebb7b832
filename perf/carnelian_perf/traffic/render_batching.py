"""The raw file of a measurement of batching as a Markdown table and as a plot of the batch sizes."""

from pathlib import Path

from carnelian_perf.pages import page, say_busy, show_plot, table, write_plot
from carnelian_perf.traffic.batching_results import Measurement, Summary, choose_best, summarise


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
