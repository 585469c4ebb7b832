"""The raw file of what an Hourglass saves: every step of every form."""

from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.raw_file import Filled, Record


@dataclass(frozen=True)
class Work:
    """What each form does."""

    batch: int
    duration_s: float
    steps: int
    """Counted ones, after one more."""
    threads: int = 1


@dataclass
class Form:
    """The plain transformer (factor 1) or an Hourglass."""

    factor: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    kept_bytes: int = 0
    """What a step's forward pass keeps for its backward pass, weights not counted; on a GPU the highest use of all."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    subject: Literal["hourglass"] = "hourglass"
    others_busy_cores: float
    """By other work, at the end."""
    accelerator: str
    """The GPU that took the steps, or `none`."""
    precision: str
    objective: str
    """pre-training, fine-tuning."""
    work: Work
    forms: Filled[Form]
