"""The result file of one cell of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from carnelian_perf import raw_file
from carnelian_perf.raw_file import RawFile, RawFileError, Speech
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.grid import Cell, Grid
from carnelian_perf.sweeps.perf_analyzer import Report

RESULT = "result.json"
GRID = "grid.json"
"""In the sweep's folder: what the results are part of."""
SEVERAL_SERVERS = (
    "Several servers answered at one address: latencies and throughput are of all together; times by stage and batch "
    "sizes are not known, since each server counts its own."
)


@dataclass(frozen=True, kw_only=True)
class Result(RawFile):
    """One run of perf_analyzer, or why there is none: the raw file of a cell, whose command is perf_analyzer's."""

    subject: Literal["sweep"] = "sweep"
    cell: Cell
    status: Literal["stable", "unstable", "failed"]
    reason: str | None
    """Why it failed."""
    report: Report | None
    """What perf_analyzer found, unless it failed."""
    backend: str
    """Of the acoustic stage."""
    configuration: str | None = None
    """SHA-256 of what the server says of the model and its stages, with their versions: files with the same were
    served alike."""
    accuracy: dict[str, float]
    """wer, cer, utterances and words of the manifest's whole clips, through the same server; empty of a network with
    random weights; no rates of clips without words."""
    speech: Speech
    others_busy_cores: float
    """Cores that other processes kept busy just before the run."""
    batches: dict[str, dict[int, int]]
    """Stage -> batch size -> executions, perf_analyzer's warm-up included."""
    one_server: bool = True
    """False where several answer at one address. Then what a server counts is left out: it is of one of them."""
    cpu_ms_per_clip: float | None
    """CPU time of the whole server, all cores together; None of a server that was not started here."""

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
        """Throughput, if stable; of a closed loop by Little's law, of an open one as perf_analyzer counts it."""
        if self.report is None or self.report.latency_ms is None:
            return None
        if self.cell.concurrency is None:
            return self.report.clips_per_s
        return 1e3 * self.cell.concurrency * self.cell.batch / self.report.latency_ms["avg"]

    def find_difference(self, machine: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[str, Any, Any] | None:
        """What is first of another machine or version, where both are known: its key, the value here, the other."""
        own = {**self.machine, **self.versions}
        for key, other in {**machine, **versions}.items():
            if own.get(key, other) != other and key != "system":  # its kernel is mended without another machine
                return key, own[key], other
        return None


def read_result(folder: Path) -> Result:
    """Read the result of a cell's folder.

    Raises:
        RawFileError: It is none, or another cell's.
    """
    path = folder / RESULT
    result = Result.read(path)
    if result.cell.name != folder.name:
        raise RawFileError(f"{path} must be of the cell that its folder is named after, but is of {result.cell.name}")
    words = folder / perf_analyzer.WORDS
    if result.report and result.report.requests is None and words.is_file():
        said = words.read_text(encoding="utf-8", errors="replace")
        return replace(result, report=replace(result.report, requests=perf_analyzer.find_requests(said)))
    return result


def read_results(folder: Path) -> list[Result]:
    """Read all results of a sweep's folder, by name of the cell.

    Raises:
        ValueError: There are no results, or a file is not one.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(
            f"a sweep's folder must be named, as `carnelian-perf sweep` makes it; {folder} has no */{RESULT}"
        )
    return [read_result(path.parent) for path in paths]


def write_grid(grid: Grid, folder: Path) -> None:
    """Keep a sweep's grid beside its results."""
    raw_file.write(folder / GRID, grid.model_dump(mode="json"))


def read_grid_of(folder: Path) -> Grid | None:
    """The grid of a sweep's results, if it is there.

    Raises:
        RawFileError: What is there is no grid.
    """
    path = folder / GRID
    return raw_file.read(path, Result.subject, Grid.model_validate_json) if path.is_file() else None
