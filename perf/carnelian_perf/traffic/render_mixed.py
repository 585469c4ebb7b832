"""The raw file of a measurement of mixed traffic as a Markdown page and a plot."""

import statistics
from pathlib import Path

from carnelian_perf.pages import page, say_busy, scale_milliseconds, show_plot, table, write_plot
from carnelian_perf.ratio import Ratio
from carnelian_perf.traffic.mixed_results import Measurement, Summary, meets, summarise

_COLOURS = ("#b3401f", "#2f6f8f", "#7a9a2e", "#8c5aa5")


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each system."""
    runs, durations = measurement.runs, measurement.traffic.durations_s
    summaries = summarise(measurement)
    mean_s = statistics.fmean(durations)
    head = ["system", f"clips/s, p95 <= {measurement.target_ms:g} ms", "times the last row", "audio s/s"]
    head += ["p50", "p95", "p99", "closed loop, clips/s", "mean batch", "padding", "CPU ms/clip"]
    rows = [_row(measurement, summary, summaries[-1], mean_s) for summary in summaries]
    notes = [
        f"Clips arrive at random (Poisson), for about {measurement.seconds:g} s in each run; latencies are "
        "milliseconds from when a clip was due. A bisection finds the highest rate that meets the target; the table "
        f"shows the median round of {len({run.round for run in runs})}.",
        f"Clips: {measurement.traffic}.",
        "Times the last row: ratios of the same round; the median, and in brackets the least and the greatest.",
        "Mean batch and padding: at the highest rates that met the target, all rounds together. Padding: frames that "
        "the network computed for each frame of the clips. CPU: in the closed loop, with 16 clients.",
        f"Transcripts of clips that no client padded: {'NOT ' if measurement.mismatches else ''}equal in all runs.",
        f"Machine: {measurement.say_machine()}. Other processes, idle servers among them, "
        f"{say_busy(run.others_busy_cores for run in runs)} before the runs.",
        *measurement.say_sources(raw_name),
    ]
    parts = [table(head, rows), show_plot("p95 over the rate, and batches", raw_name)]
    return page(f"{measurement.model}: mixed traffic within {measurement.target_ms:g} ms", measurement, parts, notes)


def draw(measurement: Measurement, path: Path) -> None:
    """Plot the 95th percentile over the rate, and the batches that the acoustic stage formed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    latency, batches = figure.subplots(1, 2)
    summaries = summarise(measurement)
    for place, (summary, colour) in enumerate(zip(summaries, _COLOURS, strict=False)):
        runs = [run for run in measurement.runs if run.system == summary.system and run.rate_per_s is not None]
        runs = sorted((run for run in runs if run.latencies_s), key=lambda run: run.rate_per_s or 0.0)
        rates, found = [run.rate_per_s for run in runs], [run.percentile_ms(95) for run in runs]
        latency.plot(rates, found, ":", color=colour, label=summary.system)
        for within, marker in ((True, "o"), (False, "x")):
            chosen = [run for run in runs if meets(run, measurement.target_ms) == within]
            latency.plot([r.rate_per_s for r in chosen], [r.percentile_ms(95) for r in chosen], marker, color=colour)
        places = [size + 0.25 * (place - (len(summaries) - 1) / 2) for size in summary.batches.sizes]
        batches.bar(places, summary.batches.percentages, width=0.25, color=colour, label=summary.system)
    label = f"{measurement.target_ms:g} ms; above it, or failed: x"
    latency.axhline(measurement.target_ms, color="grey", linewidth=1, label=label)
    latency.set(xlabel="clips per second, Poisson", ylabel="ms, p95")
    scale_milliseconds(latency)
    batches.xaxis.get_major_locator().set_params(integer=True)
    batches.set(xlabel="clips in the batch (acoustic stage)", ylabel="% of clips")
    figure.legend(*latency.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    figure.suptitle(f"{measurement.model}, clips of mixed length in an open loop", fontsize=11)
    write_plot(path, figure)


def _compare(summary: Summary, other: Summary) -> str:
    """Compare the rates of two systems, over the rounds in which the other one met the target at some rate."""
    pairs = [pair for pair in zip(summary.rates_per_s, other.rates_per_s, strict=True) if pair[1]]
    if not pairs or any(other.are_least):  # how much higher its rate of a round could be is not known
        return "-"
    is_least = any(least for least, rate in zip(summary.are_least, other.rates_per_s, strict=True) if rate)
    return f"{'at least ' if is_least else ''}{Ratio.of(*zip(*pairs, strict=True))}"


def _row(measurement: Measurement, summary: Summary, last: Summary, mean_s: float) -> list[str]:
    return [
        measurement.systems[summary.system],
        f"{'at least ' if summary.is_least else ''}{summary.rate_per_s:.1f}" if summary.rate_per_s else "none met it",
        _compare(summary, last),
        f"{summary.rate_per_s * mean_s:.0f}",
        *(f"{latency:.0f}" for latency in summary.latency_ms or ()),
        *([] if summary.latency_ms else ["", "", ""]),
        f"{summary.capacity_per_s:.1f}",
        f"{summary.batches.mean_size:.1f}",
        f"{summary.batches.padding_ratio:.2f}",
        f"{summary.cpu_ms_per_clip:.0f}",
    ]
