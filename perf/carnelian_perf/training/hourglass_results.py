"""The raw file of what an Hourglass saves: every step of every form."""

from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.raw_file import Filled, Record


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
    accelerator: str
    """The GPU that took the steps, or `none`."""
    precision: str
    objective: str
    """What the steps are part of: `pre-training` or `fine-tuning`."""
    work: Work
    forms: Filled[Form]
