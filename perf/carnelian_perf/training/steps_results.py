"""The raw file of a training benchmark: cells of the table, and every step of each."""

import statistics
from dataclasses import dataclass, field
from typing import Literal

from carnelian_perf.raw_file import Filled, Record

PLAIN = "Conv1d, eager"
OURS = "Carnelian"


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
    objective: str = "transcription"
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
