"""The results of what an Hourglass saves: the raw file, with every step of every form, and its page."""

import statistics
from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.pages import page, table
from carnelian_perf.raw_file import Filled, Record
from carnelian_perf.yardsticks.published import read_hourglass


@dataclass(frozen=True)
class Work:
    """The steps that each form takes."""

    batch: int
    duration_s: float
    steps: int
    """Number of steps that are timed, after those of the warm-up."""
    threads: int = 1


@dataclass
class Form:
    """The plain transformer (factor 1) or an Hourglass."""

    factor: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    kept_bytes: int = 0
    """Bytes that the forward pass keeps for the backward pass, without weights; on a GPU, the peak of all memory."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf hourglass`."""

    subject: Literal["hourglass"] = "hourglass"
    others_busy_cores: float
    """Cores that other processes kept busy at the end of the measurement."""
    precision: str
    objective: str
    """What the steps are part of: `pre-training` or `fine-tuning`."""
    work: Work
    forms: Filled[Form]


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each form, with the published numbers beside it."""
    on_gpu = measurement.machine["accelerator"] != "none"
    work, forms = measurement.work, measurement.forms
    medians = [statistics.median(form.wall_s if on_gpu else form.cpu_s) for form in forms]
    audio_s = work.batch * work.duration_s
    rows, published = [], read_hourglass()
    for form, seconds in zip(forms, medians, strict=True):
        speed, memory = published.get(form.factor, ("-", "-"))
        name = "plain" if form.factor == 1 else f"factor {form.factor}"
        share = form.kept_bytes / forms[0].kept_bytes
        numbers = [f"{seconds:.2f}", f"{audio_s / seconds:.2f}", f"{medians[0] / seconds:.2f}"]
        rows.append([name, *numbers, speed, f"{form.kept_bytes / 2**20:.0f}", f"{share:.1%}", memory])
    steps = len(forms[0].wall_s)
    unit, memory_of = ("wall", "the highest use") if on_gpu else ("CPU", "what is kept for the backward pass")
    head = ("transformer", "s/step", "audio s/s", "times as fast", "published", "MiB", "share of plain", "published")
    parts = [
        table(head, rows),
        f"Medians of {steps} step{'s' * (steps > 1)} of {work.batch} x {work.duration_s:g} s in "
        f"{measurement.precision}. Factor: frames pooled into one for the middle layers. Seconds are {unit} seconds, "
        f"{work.threads} thread(s); memory is {memory_of}. Published: NVIDIA DeepLearningExamples, Base, pre-training, "
        "A100 80 GB, bf16, memory as the GPU shows it.\n",
    ]
    notes = [
        f"Machine: {measurement.say_machine()}. Other processes kept {measurement.others_busy_cores:g} cores busy at "
        "the end.",
        *measurement.say_sources(raw_name),
    ]
    return page(f"Hourglass: steps of {measurement.model}, {measurement.objective}", measurement, parts, notes)
