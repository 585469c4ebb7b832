"""The result file of one cell of a sweep."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from carnelian_perf import raw_file
from carnelian_perf.raw_file import RawFile, RawFileError, Speech
from carnelian_perf.sweeps.grid import Cell, Grid
from carnelian_perf.sweeps.perf_analyzer import Report

RESULT = "result.json"
GRID = "grid.json"
"""File in the sweep's folder: the grid that the results belong to."""
SEVERAL_SERVERS = (
    "Several servers answered at one address: latencies and throughput are of all together; times by stage and batch "
    "sizes are not known, since each server counts its own."
)


@dataclass(frozen=True, kw_only=True)
class Result(RawFile):
    """The raw file of a cell: one run of perf_analyzer, or why there is none. Its command is that of perf_analyzer."""

    subject: Literal["sweep"] = "sweep"
    cell: Cell
    rate_per_s: float | None
    """Requests per second that perf_analyzer was to send in an open loop; None for a closed one, or if not found."""
    least_requests: int
    """Least number of requests in a window."""
    stability_percent: float
    """How far throughput and latency of the last three windows may lie apart."""
    status: Literal["stable", "unstable", "failed"]
    reason: str | None
    """Why the cell failed; None if it did not."""
    report: Report | None
    """What perf_analyzer found; None if the cell failed."""
    backend: str
    """Triton backend of the acoustic stage."""
    configuration: str | None
    """SHA-256 of the configurations and versions of the model and its stages, as the server gives them: models with the
    same value were served alike. None if not known."""
    accuracy: dict[str, float]
    """`wer`, `cer`, `utterances` and `words` of the manifest's whole clips, through the same server; empty for random
    weights; without rates if the clips have no words."""
    speech: Speech
    others_busy_cores: float
    """Cores that other processes kept busy just before the run."""
    batches: dict[str, dict[int, int]]
    """Stage -> batch size -> number of executions, perf_analyzer's warm-up included."""
    one_server: bool
    """False if several servers answer at one address. Then counts are left out, because each server has its own."""
    cpu_ms_per_clip: Annotated[float, Field(ge=0)] | None
    """CPU milliseconds of the whole server per clip, all cores together; None if the server was not started here."""

    def __post_init__(self) -> None:
        """Refuse numbers of which no page can be made."""
        super().__post_init__()
        report = self.report
        if self.status != (report.status if report else "failed"):
            raise ValueError("status is not that of the report, which a failed one lacks")
        acoustic = f"{self.cell.model}_acoustic"
        if report and report.stages and not (acoustic in report.stages and report.stages[acoustic].total > 0):
            raise ValueError(f"report.stages has no time of {acoustic}")
        if self.accuracy and (missing := {"utterances", "words"} - self.accuracy.keys()):
            raise ValueError(f"accuracy lacks {', '.join(sorted(missing))}")

    @property
    def clips_per_s(self) -> float | None:
        """Throughput, by Little's law in a closed loop, by perf_analyzer's count in an open one; None if not stable."""
        if self.report is None or self.report.latency_ms is None:
            return None
        if self.cell.concurrency is None:
            return self.report.clips_per_s
        return 1e3 * self.cell.concurrency * self.cell.batch / self.report.latency_ms["avg"]

    @property
    def share(self) -> float | None:
        """The share of the closed loop's throughput that an open loop reached; None if not known.

        It differs from the share asked for, `cell.poisson_share`: perf_analyzer draws the same arrivals each time, and
        in a short window they are fewer or more than on average.
        """
        if not (self.cell.poisson_share and self.rate_per_s and self.clips_per_s):
            return None
        return self.cell.poisson_share * self.clips_per_s / self.rate_per_s

    @property
    def origin(self) -> dict[str, object]:
        """What rounds of a cell have in common: versions and machine, less its system, whose kernel may be updated."""
        return {key: value for key, value in {**self.machine, **self.versions}.items() if key != "system"}

    @property
    def served(self) -> dict[str, object]:
        """What cells of a model have in common, as far as it is known."""
        served: dict[str, object] = {
            "backend": self.backend,
            "configuration": self.configuration,
            "accuracy": self.accuracy,
            "manifest": self.speech.manifest,
            "number of clips": self.speech.clips,
            "format": self.speech.format if self.cell.input == "file" else None,  # samples have no format
        }
        return {key: value for key, value in served.items() if value is not None}

    def describe(self) -> str:
        """Describe the result in one line."""
        if self.report is None:
            return f"failed: {self.reason}"
        if self.report.latency_ms is None:
            rates = [rate for rate, _ in self.report.windows]
            return f"unstable: windows of {min(rates, default=0):.1f} to {max(rates, default=0):.1f} clips/s"
        latency = self.report.latency_ms
        return f"p50 {latency['p50']:.1f}, p95 {latency['p95']:.1f} ms, {self.clips_per_s:.1f} clips/s"


def read_result(folder: Path) -> Result:
    """Read the result of a cell's folder.

    Raises:
        RawFileError: The file is not a result, or is that of another cell.
    """
    path = folder / RESULT
    result = Result.read(path)
    if result.cell.name != folder.name:
        raise RawFileError(f"{path} must be of the cell that its folder is named after, but is of {result.cell.name}")
    return result


def read_results(folder: Path) -> list[Result]:
    """Read all results of a sweep's folder, in the order of their cells' names.

    Raises:
        ValueError: There are no results, or a file is not one.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(
            f"a sweep's folder must be named, as `carnelian-perf sweep` makes it; {folder} has no */{RESULT} (yet)"
        )
    return [read_result(path.parent) for path in paths]


def write_grid(grid: Grid, folder: Path) -> None:
    """Write a sweep's grid beside its results."""
    raw_file.write(folder / GRID, grid.model_dump(mode="json"))


def read_grid_of(folder: Path) -> Grid | None:
    """Read the grid beside a sweep's results; None if there is none.

    Raises:
        RawFileError: The file is not a grid.
    """
    path = folder / GRID
    return raw_file.read(path, Result.subject, Grid.model_validate_json) if path.is_file() else None
