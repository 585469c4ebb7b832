"""The raw file of an inference benchmark as a Markdown table, in the published layout."""

import statistics
from collections import Counter
from collections.abc import Sequence

from carnelian_perf.inference.results import Measurement, Timing, find_common
from carnelian_perf.pages import page, table
from carnelian_perf.percentile import percentile
from carnelian_perf.yardsticks.published import choose

BASELINE = "plain"


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each engine, batch and duration, beside the published table if one was chosen."""
    published = choose(**measurement.published) if measurement.published else {}
    plan = measurement.plan
    head = ["Duration s", "Batch", "Engine", "p90", "p95", "p99", "avg", "median", "CPU median", "floor"]
    head += ["features", "CTC", "all, median", "RTFx", "times as fast"]
    if published:
        head.append("published avg")
    absent = _find_absent(measurement)
    rows = []
    for timing in measurement.timings:
        if timing.engine in absent:
            continue
        cells = [f"{timing.duration_s:g}", f"{timing.batch}", measurement.titles[timing.engine]]
        if timing.not_run:
            cells.append(timing.not_run)
        else:
            cells += _numbers(measurement, timing)
        beside = published.get((timing.duration_s, timing.batch))
        cells += [""] * (len(head) - len(cells) - bool(published))
        rows.append([*cells, *([f"{beside.avg:.1f}" if beside else "-"] if published else [])])
    notes = [
        "Milliseconds of a batch. From p90 to CPU median: the network alone, by engine. Features (DALI, the served "
        "graph) and greedy CTC: shared by all engines. All: the medians of features, network and CTC, added; RTFx: "
        "seconds of audio per second of that.",
        f"{plan.steps} counted step{'s' * (plan.steps != 1)} after {plan.warm_up} of warm-up; engines take "
        "turns, step by step.",
        "Floor: the network's convolutions and matrix products at the best rate of a 1x1 convolution on this machine, "
        f"{measurement.gflop_per_s:.0f} GFLOP/s in "
        f"{'fp32' if measurement.machine['accelerator'] == 'none' else plan.precision}"
        ". Lower precisions may have lower floors.",
        f"Times as fast: compared with {' or '.join(_name_baselines(measurement))}, by the median"
        + (" of CPU time." if _by_cpu(measurement) else "."),
        _say_texts(measurement),
        *(f"{measurement.titles[engine]}: {why}." for engine, why in absent.items()),
        f"Network: {plan.source}{' with random weights' if plan.random_weights else ''}, "
        f"{plan.precision}, {measurement.say_threads()}. Speech: {plan.manifest}.",
        f"Machine: {measurement.say_machine()}. Other processes kept {measurement.others_busy_cores:.1f} cores busy "
        "before.",
        *measurement.say_sources(raw_name),
    ]
    if published:
        notes.append(f"Published avg: {next(iter(published.values())).title}, by others on that machine.")
    return page(f"{measurement.model}: inference without a server", measurement, [table(head, rows)], notes)


def _find_absent(measurement: Measurement) -> dict[str, str]:
    """Find the engines that did not run in any cell, always for the same reason: engine -> reason."""
    reasons: dict[str, set[str | None]] = {}
    for timing in measurement.timings:
        reasons.setdefault(timing.engine, set()).add(timing.not_run)
    return {engine: str(*why) for engine, why in reasons.items() if len(why) == 1 and None not in why}


def _say_texts(measurement: Measurement) -> str:
    wrong = Counter(timing.engine for timing in measurement.timings if timing.same_texts is False)
    if all(timing.not_run for timing in measurement.timings):
        return "No engine ran, so no texts were compared."
    if not wrong:
        return "Texts are equal for all engines."
    titles = measurement.titles
    first = next(iter(titles.values()))
    differences = [
        f"Texts of {titles[engine]} DIFFER from those of {first} in {count} row{'s' * (count > 1)}."
        for engine, count in wrong.items()
    ]
    if "onnx_int8" in wrong:
        differences.append("Int8 uses scales made from noise here, which do not change its speed.")
    precision = measurement.plan.precision
    if precision != "fp32" and measurement.plan.random_weights:
        # With random weights, the signal fades. Batch norms with the statistics of noise would prevent that, but then
        # QuartzNet 15x5 amplifies rounding: float16 changed half of the best labels, and float32 missed the tolerance
        # of an export.
        differences.append(
            f"With random weights, rounding in {precision} decides which label is best; it does not change the speed."
        )
    return " ".join(differences)


def _numbers(measurement: Measurement, timing: Timing) -> list[str]:
    common, median = find_common(measurement, timing.duration_s, timing.batch), statistics.median
    features_ms, decoding_ms = median(common.features_ms), median(common.decoding_ms)
    network_ms = median(timing.network_ms)
    all_ms = features_ms + network_ms + decoding_ms
    percentiles = (percentile(timing.network_ms, percent) for percent in (90, 95, 99))
    numbers = [*percentiles, statistics.fmean(timing.network_ms), network_ms, median(timing.network_cpu_ms)]
    floor_ms = 1e3 * common.gflop / measurement.gflop_per_s
    numbers += [floor_ms, features_ms, decoding_ms, all_ms]
    rtfx = 1e3 * timing.duration_s * timing.batch / all_ms
    base = _find_baseline(measurement, timing)
    return [
        *(f"{number:.{1 if number >= 10 else 2}f}" for number in numbers),
        f"{rtfx:.0f}",
        f"{_typical(measurement, base) / _typical(measurement, timing):.2f}" if base else "-",
    ]


def _find_baseline(measurement: Measurement, timing: Timing) -> Timing | None:
    same: Sequence[Timing] = [
        t for t in measurement.timings if (t.duration_s, t.batch) == (timing.duration_s, timing.batch) and not t.not_run
    ]
    return next((t for t in same if t.engine == BASELINE), same[0] if same else None)


def _name_baselines(measurement: Measurement) -> list[str]:
    """Name the engines that rows are compared with: the baseline or, where it did not run, the first that did."""
    found = (_find_baseline(measurement, timing) for timing in measurement.timings if not timing.not_run)
    return list(dict.fromkeys(measurement.titles[base.engine] for base in found if base)) or ["none"]


def _by_cpu(measurement: Measurement) -> bool:
    return (measurement.machine["accelerator"], measurement.plan.threads) == ("none", 1)


def _typical(measurement: Measurement, timing: Timing) -> float:
    """Return the median step: CPU time for one thread on a CPU, which other load changes least, else wall time."""
    return statistics.median(timing.network_cpu_ms if _by_cpu(measurement) else timing.network_ms)
