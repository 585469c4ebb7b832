"""The raw file of a tuning as a Markdown page: what each step tried, and what it kept."""

import statistics
from collections.abc import Sequence

from carnelian_perf.pages import page, say_busy, table
from carnelian_perf.server.tune_results import (
    CONFIRMATION,
    LEAST_GAIN,
    LEAST_SHARE,
    SHIPPED,
    Measurement,
    Run,
    compare,
    name_settings,
)


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each tuning of each step."""
    head = ("step", "tuning", "clips/s", "p50 ms", "p95 ms", "CPU ms/clip", "over the shipped", "worst", "best", "")
    notes = [
        f"Objective: {_say_objective(measurement)}; {measurement.requests} requests in a run, "
        f"{measurement.concurrency} at a time.",
        "Over the shipped: how many times as good as the shipped settings in the same round, by the objective; the "
        f"median, worst and best of the rounds. A change is kept if it gains {LEAST_GAIN:.0%} on the settings so far "
        f"in the median round, and gains in at least {LEAST_SHARE:.0%} of the rounds.",
        f"Shipped: {name_settings(measurement.shipped)}. Threads 0: all cores in ONNX Runtime, one in the features' "
        "graph.",
        f"Clips: {measurement.traffic}.",
        f"Transcripts: {'NOT ' if measurement.mismatches else ''}equal in all runs.",
        f"Machine: {measurement.say_machine()}. Other processes "
        f"{say_busy(run.others_busy_cores for run in measurement.runs)} before the runs.",
        *measurement.say_sources(raw_name),
    ]
    rows = [row for step in measurement.kept for row in _rows(measurement, step)]
    winner = measurement.winner
    verdict = [] if winner is None else [f"**Result: {name_settings(winner)}.**\n"]
    return page(f"{measurement.model}: tuned", measurement, [*verdict, table(head, rows)], notes)


def _say_objective(measurement: Measurement) -> str:
    if measurement.objective == "latency":
        return "the median latency"
    return f"clips per second, reduced in proportion where the 95th percentile exceeds {measurement.target_ms:g} ms"


def _rows(measurement: Measurement, step: str) -> list[list[str]]:
    names = list(dict.fromkeys(run.tuning for run in measurement.runs if run.step == step))
    places = list(measurement.tunings)
    return [_row(measurement, step, name) for name in sorted(names, key=places.index)]


def _row(measurement: Measurement, step: str, name: str) -> list[str]:
    runs, shipped = measurement.runs_of(step, name), measurement.runs_of(step, SHIPPED)
    ratio = compare(runs, shipped, measurement.objective, measurement.target_ms).ratio
    kept = "kept" if measurement.kept[step] == name and step != CONFIRMATION else ""
    if step == CONFIRMATION and measurement.kept[step] == name:
        kept = "result"
    ratios = ["", "", ""] if name == SHIPPED else [f"{number:.2f}" for number in ratio]
    return [step, name, *_say_runs(runs), *ratios, kept]


def _say_runs(runs: Sequence[Run]) -> list[str]:
    """Show medians of the runs: throughput, latencies and CPU time; `failed` if one of them failed."""
    whole = [run for run in runs if run.latencies_s]
    if len(whole) < len(runs):
        return ["failed", "", "", ""]
    return [
        f"{statistics.median(run.clips_per_s for run in whole):.1f}",
        f"{statistics.median(run.percentile_ms(50) for run in whole):.1f}",
        f"{statistics.median(run.percentile_ms(95) for run in whole):.1f}",
        f"{statistics.median(run.cpu_ms_per_clip for run in whole):.1f}",
    ]
