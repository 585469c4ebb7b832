"""The raw file of a measurement of what serving costs: ways to transcribe the same clips, in turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech, Split

IN_PROCESS, ACOUSTIC, PCM, FILE = "in_process", "acoustic", "pcm", "file"
STATIC, PCM_CLIENTS, FILE_CLIENTS = "static", "pcm_clients", "file_clients"
"""The ways."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way, once."""

    way: str
    duration_s: float
    """Of each clip."""
    round: int
    clips: int
    wall_s: float
    latencies_s: list[float]
    """Of each request."""
    cpu_s: float
    """Of the server and its models, all cores together; in process, of that process."""
    stages: dict[str, Split]
    """By stage; means of its requests."""

    @property
    def latency_ms(self) -> float:
        """The median."""
        return 1e3 * statistics.median(self.latencies_s)

    @property
    def cpu_ms(self) -> float:
        """Of a clip."""
        return 1e3 * self.cpu_s / self.clips

    @property
    def clips_per_s(self) -> float:
        """Throughput."""
        return self.clips / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    subject: Literal["overhead"] = "overhead"
    others_busy_cores: float
    """Cores that other processes kept busy before."""
    clients: int
    """That send single clips at the same time."""
    batch: int
    """Size of the ready-made ones."""
    speech: Speech
    ways: dict[str, str]
    """Name -> title, in the order of the tables."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(run.duration_s for run in self.runs))

    def runs_of(self, way: str, duration_s: float) -> list[Run]:
        """By round."""
        found = [run for run in self.runs if (run.way, run.duration_s) == (way, duration_s)]
        return sorted(found, key=lambda run: run.round)

    def ratio(self, way: str, other: str, duration_s: float, measure: Callable[[Run], float]) -> Ratio:
        """A way over another."""
        return Ratio.of(map(measure, self.runs_of(way, duration_s)), map(measure, self.runs_of(other, duration_s)))
