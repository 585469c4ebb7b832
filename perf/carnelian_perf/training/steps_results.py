"""The raw file of a training benchmark: cells of the table, and every step of each."""

import statistics
from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.raw_file import Filled, Record

PLAIN = "Conv1d, eager"
OURS = "Carnelian"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the table."""

    form: str
    """`OURS` or `PLAIN`."""
    precision: str
    """One of :data:`carnelian_perf.options.PRECISIONS`."""
    batch: int
    """Clips per process."""
    processes: int = 1


@dataclass(kw_only=True)
class Result:
    """What became of a cell."""

    cell: Cell
    not_run: str | None = None
    wall_s: list[float] = field(default_factory=list)
    """Of each counted step, in the first process."""
    cpu_s: list[float] = field(default_factory=list)
    """Of the same steps."""
    losses: list[float] = field(default_factory=list)
    """Of the same steps, per character, in pre-training per hidden frame: ours and the baseline's fall alike, for they
    are the same network on the same clips."""

    def utterances_per_s(self) -> float:
        """All processes together, by the median step's wall time."""
        return self.cell.batch * self.cell.processes / statistics.median(self.wall_s)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each cell does."""

    duration_s: float
    """Of every clip."""
    steps: int
    """Counted ones, after `warm_up`."""
    warm_up: int = 1
    threads: int = 1
    """Of the CPU, where there is one process; several have one each."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a step of a precision and batch takes at least, as :mod:`carnelian_perf.yardsticks.floors` counts it."""

    precision: str
    batch: int
    gflop: float
    gbyte: float


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    subject: Literal["training"] = "training"
    objective: str = "transcription"
    """transcription, pre-training."""
    others_busy_cores: float
    """Before the first step."""
    compiled: bool
    work: Work
    gflop_per_s: dict[str, float]
    """Precision -> the best rate of a 1x1 convolution on this machine."""
    gbyte_per_s: float
    """The best rate of a copy."""
    floors: list[Floor]
    results: Filled[Result]
