"""The results of mixed traffic: the raw file, its summary, the page and its plot."""

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carnelian_perf.pages import page, say_busy, scale_milliseconds, show_plot, table, write_plot
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Traffic
from carnelian_perf.traffic.batches import BatchedRun, Batches

_COLOURS = ("#b3401f", "#2f6f8f", "#7a9a2e", "#8c5aa5")


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
    """The results of one system. The middle round is that of the median rate; of two in the middle, the lower one."""

    system: str
    capacity_per_s: float
    """Throughput of the closed loop, in clips per second; the median of the rounds."""
    rate_per_s: float
    """The highest rate at which the 95th percentile met the target in the middle round; 0 if none did."""
    is_least: bool
    """Whether every rate of the middle round met the target, so that a higher rate may meet it, too."""
    rates_per_s: list[float]
    """The highest rate of each round at which the target was met; 0 if none did."""
    are_least: list[bool]
    """Of each round what `is_least` is of the middle one."""
    latency_ms: list[float] | None
    """50th, 95th and 99th percentile of latency at `rate_per_s`, in the middle round; None if none met it."""
    batches: Batches
    """The batches in the runs of `rates_per_s`; if there are none, in all open loops."""
    cpu_ms_per_clip: float
    """CPU milliseconds of the server and its models per clip, in the closed loops; the median of the rounds."""


def meets(run: Run, target_ms: float) -> bool:
    """Whether every clip was answered and the 95th percentile is within the target."""
    return not run.errors and bool(run.latencies_s) and run.percentile_ms(95) <= target_ms


def summarise(measurement: Measurement) -> list[Summary]:
    """Summarise the runs of each system, in the order of the systems."""
    return [_summarise(measurement, system) for system in measurement.systems]


def _complete(measurement: Measurement) -> list[Run]:
    """Leave out the last round if it was interrupted, unless it is the only one: its search had not ended."""
    num_runs = Counter(run.round for run in measurement.runs)
    first, last = min(num_runs), max(num_runs)
    if measurement.finished or num_runs[last] == num_runs[first]:
        return measurement.runs
    return [run for run in measurement.runs if run.round != last]


def _summarise(measurement: Measurement, system: str) -> Summary:
    runs = [run for run in _complete(measurement) if run.system == system]
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


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each system."""
    runs, durations = _complete(measurement), measurement.traffic.durations_s
    summaries = summarise(measurement)
    mean_s = statistics.fmean(durations)
    num_rounds = len({run.round for run in runs})
    shown = "median round" if num_rounds % 2 else "lower of the two middle rounds"
    head = ["system", f"clips/s, p95 <= {measurement.target_ms:g} ms", "times the last row", "audio s/s"]
    head += ["p50", "p95", "p99", "closed loop, clips/s", "mean batch", "padding", "CPU ms/clip"]
    rows = [_row(measurement, summary, summaries[-1], mean_s) for summary in summaries]
    notes = [
        f"Clips arrive at random (Poisson), for about {measurement.seconds:g} s in each run; latencies are "
        "milliseconds from when a clip was due. A bisection finds the highest rate that meets the target. The table "
        f"shows, for each system, this rate and its latencies in the {shown} of {num_rounds}; closed loop and CPU are "
        "medians of the rounds.",
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
    none = "none met it" if any(run.rate_per_s for run in measurement.runs) else "no open loop has run yet"
    return [
        measurement.systems[summary.system],
        f"{'at least ' if summary.is_least else ''}{summary.rate_per_s:.1f}" if summary.rate_per_s else none,
        _compare(summary, last),
        f"{summary.rate_per_s * mean_s:.0f}",
        *(f"{latency:.0f}" for latency in summary.latency_ms or ()),
        *([] if summary.latency_ms else ["", "", ""]),
        f"{summary.capacity_per_s:.1f}",
        f"{summary.batches.mean_size:.1f}",
        f"{summary.batches.padding_ratio:.2f}",
        f"{summary.cpu_ms_per_clip:.0f}",
    ]
