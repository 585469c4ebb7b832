"""The results of a training benchmark: the raw file, and its page with the published rows marked as such."""

import statistics
from dataclasses import dataclass, field, replace
from typing import Literal

from carnelian_perf.pages import page, table
from carnelian_perf.raw_file import Filled, Record
from carnelian_perf.yardsticks.published import read_throughput

PLAIN = "Conv1d, eager"
OURS = "Carnelian"
SOURCE = "NVIDIA DeepLearningExamples, commit 729963dd"
_OF_EPOCHS = (
    "These are whole epochs of LibriSpeech, with data loading and gradient accumulation; a batch is padded to its "
    "longest clip, at most 16.7 s."
)
_OF_TOKENS = (
    "These are of Base with the Hourglass of factor 4. Tokens are masked frames in pre-training and letters in "
    "fine-tuning, not seconds of audio, so compare only ratios between precisions and numbers of GPUs."
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table: what its steps are taken with."""

    form: str
    """The implementation: :data:`OURS` or :data:`PLAIN`, the baseline."""
    precision: str
    """One of :data:`carnelian_perf.options.PRECISIONS`."""
    batch: int
    """Number of clips per process."""
    processes: int = 1


@dataclass(kw_only=True)
class Result:
    """The steps of a cell, or why it did not run."""

    cell: Cell
    not_run: str | None = None
    wall_s: list[float] = field(default_factory=list)
    """Wall seconds of each counted step, in the first process."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each counted step, in the first process."""
    losses: list[float] = field(default_factory=list)
    """Loss of each counted step, per character or, in pre-training, per hidden frame. Ours and the baseline's fall
    alike, because they are the same network on the same clips."""

    def utterances_per_s(self) -> float:
        """Return the throughput of all processes together, by the median step's wall time."""
        return self.cell.batch * self.cell.processes / statistics.median(self.wall_s)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The steps that each cell takes."""

    duration_s: float
    """Duration of every clip, in seconds."""
    steps: int
    """Number of counted steps, after those of `warm_up`."""
    warm_up: int = 1
    threads: int = 1
    """Number of CPU threads of a single process; several processes have one each."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least work of a step, by precision and batch, as :mod:`carnelian_perf.yardsticks.floors` counts it."""

    precision: str
    batch: int
    gflop: float
    gbyte: float


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf training`."""

    subject: Literal["training"] = "training"
    objective: str
    """What the steps train: `transcription` or `pre-training`."""
    others_busy_cores: float
    """Cores that other processes kept busy before the first step."""
    compiled: bool
    work: Work
    gflop_per_s: dict[str, float]
    """Precision -> the best rate of a 1x1 convolution on this machine, in GFLOP/s."""
    gbyte_per_s: float
    """The best rate of a copy in memory, in GB/s read and written."""
    floors: list[Floor]
    results: Filled[Result]


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each cell, and the published rows of the model."""
    head = ["", "precision", "clips per process", "processes", "utterances/s", "utterances per CPU s", "audio s/s"]
    head += ["audio s per CPU s", "ms/step", "CPU ms/step", "GFLOP", "GB", "floor ms", "floor / step", "weak scaling"]
    cells = table(head, [_row(result, measurement) for result in measurement.results])
    notes = [*_ratios(measurement), *_amp(measurement.results), *_notes(measurement, raw_name)]
    objective = _objective(measurement)
    ours = page(f"{measurement.model}: {objective} throughput", measurement, [cells], notes)
    return "\n".join([ours, *_published(measurement.model, objective)])


def _objective(measurement: Measurement) -> str:
    return "pre-training" if measurement.objective == "pre-training" else "training"


def _published(model: str, objective: str) -> list[str]:
    if model.startswith("wav2vec2_base"):
        model = "wav2vec2_base_hourglass/" + ("pretrain" if objective == "pre-training" else "finetune")
    columns = ("hardware", "precision", "batch_per_gpu", "gpus", "throughput")
    rows = [[row[column] for column in columns] for row in read_throughput(model)]
    if not rows:
        return []
    unit, note = "utterances/s", _OF_EPOCHS
    if "/" in model:
        unit, note = "tokens/s", _OF_TOKENS
    head = ("", "precision", "clips per process", "processes", unit)
    return [f"Published by others, on other machines ({SOURCE}):\n", table(head, rows), f"{note}\n"]


def ratios(results: list[Result]) -> dict[tuple[str, int], tuple[float, float]]:
    """Compare ours with the baseline: (precision, batch) -> times as fast by CPU seconds, and by wall seconds."""
    alone = [result for result in results if not result.not_run and result.cell.processes == 1]
    by_form = {
        form: {(r.cell.precision, r.cell.batch): r for r in alone if r.cell.form == form} for form in (OURS, PLAIN)
    }
    median = statistics.median
    return {
        key: (median(plain.cpu_s) / median(ours.cpu_s), median(plain.wall_s) / median(ours.wall_s))
        for key, plain in by_form[PLAIN].items()
        if (ours := by_form[OURS].get(key))
    }


def _row(result: Result, measurement: Measurement) -> list[str]:
    cell = result.cell
    floor = next(f for f in measurement.floors if (f.precision, f.batch) == (cell.precision, cell.batch))
    start = [cell.form, cell.precision, str(cell.batch), str(cell.processes)]
    counts = [f"{floor.gflop:.0f}", f"{floor.gbyte:.1f}"]
    if result.not_run:
        return [*start, result.not_run, *[""] * 5, *counts]
    by_cpu = measurement.machine["accelerator"] == "none" and measurement.work.threads == 1
    wall_s, cpu_s = statistics.median(result.wall_s), statistics.median(result.cpu_s)
    least_s = max(floor.gflop / measurement.gflop_per_s[cell.precision], floor.gbyte / measurement.gbyte_per_s)
    share = least_s / (cpu_s if by_cpu else wall_s)
    duration_s = measurement.work.duration_s
    per_s, per_cpu_s = result.utterances_per_s(), cell.batch / cpu_s
    rates = [f"{per_s:.2f}", f"{per_cpu_s:.2f}", f"{duration_s * per_s:.1f}", f"{duration_s * per_cpu_s:.1f}"]
    times = [f"{1000 * wall_s:.0f}", f"{1000 * cpu_s:.0f}"]
    scaling = _scaling(result, measurement.results)
    return [*start, *rates, *times, *counts, f"{1000 * least_s:.0f}", f"{share:.0%}", scaling]


def _scaling(result: Result, results: list[Result]) -> str:
    """Divide the rate of many processes by as many times the rate of one: by wall seconds, and by CPU seconds."""
    alone = [
        other
        for other in results
        if not other.not_run and other.cell == replace(result.cell, processes=1) and other is not result
    ]
    if not alone:
        return ""
    median = statistics.median
    by_wall = median(alone[0].wall_s) / median(result.wall_s)
    return f"{by_wall:.0%} ({median(alone[0].cpu_s) / median(result.cpu_s):.0%})"


def _ratios(measurement: Measurement) -> list[str]:
    on_gpu = measurement.machine["accelerator"] != "none"
    return [
        f"**{precision}, {batch} clips: {by_wall if on_gpu else by_cpu:.2f} times as fast as plain `Conv1d` in "
        "PyTorch eager**" + (" by the clock." if on_gpu else f" by CPU time, {by_wall:.2f} by the clock.")
        for (precision, batch), (by_cpu, by_wall) in ratios(measurement.results).items()
    ]


def _amp(results: list[Result]) -> list[str]:
    """Say how many times as fast as TF32 half precision is, where both ran."""
    rates = {
        (r.cell.precision, r.cell.batch, r.cell.processes): r.utterances_per_s()
        for r in results
        if r.cell.form == OURS and not r.not_run
    }
    return [
        f"{precision} is {rate / rates['tf32', batch, processes]:.2f} times as fast as TF32: {batch} clips, "
        f"{processes} process{'es' * (processes > 1)}."
        for (precision, batch, processes), rate in rates.items()
        if precision in ("bf16", "fp16") and ("tf32", batch, processes) in rates
    ]


def _notes(measurement: Measurement, raw_name: str) -> list[str]:
    machine, work = measurement.machine, measurement.work
    has_baseline = any(result.cell.form == PLAIN and not result.not_run for result in measurement.results)
    turns = f" {OURS} and plain `Conv1d` take turns, step by step." if has_baseline else ""
    peaks = ", ".join(f"{rate:.0f} in {precision}" for precision, rate in measurement.gflop_per_s.items()) or "-"
    return [
        f"Steps are those of `carnelian-train fit`, on ready-made features of clips of {work.duration_s} s; medians of "
        f"{work.steps} counted steps after {work.warm_up} of warm-up. Losses are in the raw file.{turns}",
        "CPU time: of all threads of one process; with one thread, what the clock would show on an idle machine.",
        "Weak scaling: the speed of each process, compared with one alone; in brackets by CPU time, which leaves out "
        "what other programs take. By the clock it says something only if each process has a core or a GPU of its own.",
        "Floor: the longer of two times: GFLOP at the best rate of a 1x1 convolution on as many threads or the GPU "
        f"(GFLOP/s: {peaks}), or GB at the best rate of a copy in memory ({measurement.gbyte_per_s:.0f} GB/s). Caches "
        "can be faster.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {work.threads} thread(s) in a single process, "
        f"accelerator: {machine['accelerator']}. Other processes kept {measurement.others_busy_cores:.1f} cores busy "
        f"at the start. `torch.compile`: {'on' if measurement.compiled else 'off'}.",
        *measurement.say_sources(raw_name),
    ]
