"""The raw file of a measurement of what serving costs: ways to transcribe the same clips, in turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech, Split

IN_PROCESS, ACOUSTIC, PCM, FILE = "in_process", "acoustic", "pcm", "file"
STATIC, PCM_CLIENTS, FILE_CLIENTS = "static", "pcm_clients", "file_clients"
"""Names of the ways with many clips; the line above names those with one clip at a time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One turn of one way."""

    way: str
    duration_s: float
    """Duration of each clip, in seconds."""
    round: int
    clips: int
    wall_s: float
    latencies_s: list[float]
    """Seconds that each request took."""
    cpu_s: float
    """CPU seconds of the server and its models, all cores together; of the measuring process for `in_process`."""
    stages: dict[str, Split]
    """Stage -> mean time of its requests."""

    @property
    def latency_ms(self) -> float:
        """The median latency of a request, in milliseconds."""
        return 1e3 * statistics.median(self.latencies_s)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per clip."""
        return 1e3 * self.cpu_s / self.clips

    @property
    def clips_per_s(self) -> float:
        """Throughput, in clips per second."""
        return self.clips / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf overhead`."""

    subject: Literal["overhead"] = "overhead"
    others_busy_cores: float
    """Cores that other processes kept busy before the measurement."""
    clients: int
    """Number of clients that send single clips at the same time."""
    batch: int
    """Number of clips in a ready-made batch."""
    speech: Speech
    ways: dict[str, str]
    """Name -> title, in the order of the tables."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """Return the durations of the clips in seconds, in the order in which they were measured."""
        return list(dict.fromkeys(run.duration_s for run in self.runs))

    def runs_of(self, way: str, duration_s: float) -> list[Run]:
        """Return the runs of one way and duration, in the order of the rounds."""
        found = [run for run in self.runs if (run.way, run.duration_s) == (way, duration_s)]
        return sorted(found, key=lambda run: run.round)

    def ratio(self, way: str, other: str, duration_s: float, measure: Callable[[Run], float]) -> Ratio:
        """Divide the `measure` of one way by that of another, round by round, for clips of one duration."""
        return Ratio.of(map(measure, self.runs_of(way, duration_s)), map(measure, self.runs_of(other, duration_s)))
