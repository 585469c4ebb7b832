"""The results of an inference benchmark: the raw file, and its page in the published layout."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.pages import page, table
from carnelian_perf.percentile import percentile
from carnelian_perf.raw_file import Filled, Record
from carnelian_perf.yardsticks.published import choose

TITLES = {
    "plain": "PyTorch eager, plain Conv1d",
    "eager": "PyTorch eager",
    "graphs": "PyTorch, CUDA graphs",
    "compiled": "PyTorch compiled",
    "compiled_graphs": "PyTorch compiled, CUDA graphs",
    "onnx_conv1d": "ONNX Runtime, Conv1d without masks, the form of NeMo's export",
    "onnx": "ONNX Runtime, as served",
    "onnx_int8": "ONNX Runtime, int8",
    "tensorrt": "TensorRT",
}
"""Engine -> what it is called in the page."""
DEFAULTS = ("plain", "eager", "onnx_conv1d", "onnx")
"""The engines that are measured unless others are named, where the network has them."""
PLAIN = ("plain", "onnx_conv1d")
"""The engines of which only QuartzNet has a form."""
AS_SERVED = "onnx"
GPU_ONLY = ("graphs", "compiled_graphs", "tensorrt")
BASELINE = "plain"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of an inference benchmark."""

    source: str
    """Path of a checkpoint, or of a training YAML."""
    random_weights: bool
    """Whether the source is a training YAML, whose network nobody has trained: its speed is the same."""
    manifest: str
    """Path of the manifest of the speech that is cut to the durations."""
    engines: list[str]
    durations_s: list[float]
    batches: list[int]
    steps: int
    """Counted steps."""
    warm_up: int
    """Steps before the counted ones."""
    threads: int
    """CPU threads."""
    device: str = "cpu"
    """Where networks run: cpu or cuda."""
    precision: str = "fp32"
    overrides: list[str] = field(default_factory=list)
    """Changes to a training YAML, each `a.b=value`."""


@dataclass(kw_only=True)
class Timing:
    """One engine at one batch and duration; milliseconds of each counted step."""

    engine: str
    duration_s: float
    batch: int
    not_run: str | None = None
    network_ms: list[float] = field(default_factory=list)
    network_cpu_ms: list[float] = field(default_factory=list)
    same_texts: bool | None = None
    """Whether the texts equal those of the first engine that ran; None if this engine did not run."""


@dataclass(kw_only=True)
class Common:
    """What all engines of a batch and duration share; milliseconds of each counted step."""

    duration_s: float
    batch: int
    features_ms: list[float] = field(default_factory=list)
    decoding_ms: list[float] = field(default_factory=list)
    """Greedy decoding of what the first engine that ran gave; texts of others may take longer or shorter."""
    gflop: float
    """Operations of the network's convolutions and matrix products on the batch, in 10^9."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf infer`."""

    subject: Literal["infer"] = "infer"
    others_busy_cores: float
    """Cores that other processes kept busy before the measurement."""
    gflop_per_s: float
    """The best rate of a 1x1 convolution on this machine, in GFLOP/s."""
    titles: dict[str, str]
    """Engine -> what the page calls it, in the order of the tables."""
    plan: Plan
    published: dict[str, str] | None = None
    """Arguments of `yardsticks.published.choose` for the published table beside it; empty or None for none."""
    timings: Filled[Timing]
    common: list[Common]

    def say_threads(self) -> str:
        """Say in words how many CPU threads were used."""
        return f"{self.plan.threads} thread{'s' * (self.plan.threads != 1)}"


def find_common(measurement: Measurement, duration_s: float, batch: int) -> Common:
    """Find what all engines of a batch and duration share."""
    return next(row for row in measurement.common if (row.duration_s, row.batch) == (duration_s, batch))


def sum_up_served(measurement: Measurement, engine: str) -> dict[tuple[float, int], float]:
    """Sum the median milliseconds of features, network in one engine, and decoding: (duration, batch) -> sum."""
    found = {}
    for timing in measurement.timings:
        if timing.engine == engine and timing.network_ms:
            common = find_common(measurement, timing.duration_s, timing.batch)
            parts = (common.features_ms, timing.network_ms, common.decoding_ms)
            # Not `sum`, whose rounding differs between versions of Python, and with it the page.
            found[timing.duration_s, timing.batch] = math.fsum(statistics.median(part) for part in parts)
    return found


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each engine, batch and duration, beside the published table if one was chosen."""
    published = choose(**measurement.published) if measurement.published else {}
    fits = any((timing.duration_s, timing.batch) in published for timing in measurement.timings)
    plan = measurement.plan
    head = ["Duration s", "Batch", "Engine", "p90", "p95", "p99", "avg", "median", "CPU median", "floor"]
    head += ["features", "CTC", "all, median", "RTFx", "times as fast"]
    if fits:
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
        cells += [""] * (len(head) - len(cells) - fits)
        rows.append([*cells, *([f"{beside.avg:.1f}" if beside else "-"] if fits else [])])
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
        title = next(iter(published.values())).title
        words = "by others on that machine" if fits else "has none of these durations and batches"
        notes.append(f"Published avg: {title}, {words}.")
    return page(f"{measurement.model}: inference without a server", measurement, [table(head, rows)], notes)


def _find_absent(measurement: Measurement) -> dict[str, str]:
    """Find the engines that did not run in any cell, always for the same reason: engine -> reason."""
    reasons: dict[str, set[str | None]] = {}
    for timing in measurement.timings:
        reasons.setdefault(timing.engine, set()).add(timing.not_run)
    return {engine: str(*why) for engine, why in reasons.items() if len(why) == 1 and None not in why}


def _say_texts(measurement: Measurement) -> str:
    firsts = {(t.duration_s, t.batch): t.engine for t in reversed(measurement.timings) if not t.not_run}
    wrong = Counter(
        (timing.engine, firsts[timing.duration_s, timing.batch])
        for timing in measurement.timings
        if timing.same_texts is False
    )
    if all(timing.not_run for timing in measurement.timings):
        return "No engine ran, so no texts were compared."
    if not wrong:
        return "Texts are equal for all engines."
    titles = measurement.titles
    differences = [
        f"Texts of {titles[engine]} DIFFER from those of {titles[first]} in {count} row{'s' * (count > 1)}."
        for (engine, first), count in wrong.items()
    ]
    if any(engine == "onnx_int8" for engine, _ in wrong):
        differences.append(
            "Int8 rounds, here with scales of noise where it needs any from clips; they do not change its speed."
        )
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
