"""Measure one cell of a sweep: perf_analyzer on the real server, with checked transcripts and a result file."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from carnelian_perf import raw_file
from carnelian_perf.cuts import Cut, cut_equal, write_files, write_pcm
from carnelian_perf.load import LoadError
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_perf.stages import StageStatistics, settle_statistics
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.grid import Cell, CellError, Grid
from carnelian_perf.sweeps.results import RESULT, Result
from carnelian_perf.sweeps.target import Served, Target, digest
from carnelian_perf.sweeps.transcripts import check_answers, rounding_cer, transcribe_file

RECOVERY_S = 10.0
"""Seconds within which the queues of a server that had more requests than it could answer are empty again."""


@dataclass(kw_only=True)
class Sweep:
    """A sweep while it runs: its grid, its server, and what its cells share."""

    grid: Grid
    out: Path
    target: Target
    program: Path
    scratch: Path
    facts: dict[str, Any]
    """The fields that all results share."""
    done: dict[str, Result]
    """Cell's name -> its result, those of earlier runs included."""
    models: dict[str, Served] = field(default_factory=dict)
    cuts: dict[float, list[Cut]] = field(default_factory=dict)
    expected: dict[tuple[str, float], list[str]] = field(default_factory=dict)
    """(model, duration) -> the transcript of each clip when it is sent alone."""


@dataclass(kw_only=True)
class _Attempt:
    """What one attempt at a cell gives, as far as it gets."""

    command: list[str] = field(default_factory=list)
    rate_per_s: float | None = None
    report: perf_analyzer.Report | None = None
    reason: str | None = None
    """Why there is no report."""
    batches: dict[str, dict[int, int]] = field(default_factory=dict)
    server_cpu_s: float = 0.0
    """Of a server that was started here."""

    def cpu_ms_per_clip(self) -> float | None:
        """Return the milliseconds of CPU per clip; None if the clips were not counted."""
        clips = sum(size * count for size, count in self.batches.get("acoustic", {}).items())
        return round(1e3 * self.server_cpu_s / clips, 3) if clips else None


def measure(sweep: Sweep, cell: Cell) -> Result:
    """Measure a cell; a failure is recorded as its result, unless the server is gone.

    Raises:
        RuntimeError: The server is gone, serves another model, or no longer transcribes.
    """
    grid, served = sweep.grid, sweep.models[cell.model]
    folder = sweep.out / cell.name
    _empty(folder)
    sweep.target.ask(sweep.target.client.is_server_ready)
    busy = measure_busy_cores(0.5)
    found = _run_once(sweep, cell, folder)
    result = Result(
        cell=cell,
        rate_per_s=found.rate_per_s,
        least_requests=grid.requests,
        stability_percent=grid.stability_percent,
        status="failed" if found.report is None else found.report.status,
        reason=found.reason,
        report=found.report,
        date=raw_file.utc_now(),
        command=shlex.join(["perf_analyzer", *found.command[1:]]) if found.command else "",
        backend=served.backend,
        configuration=served.configuration,
        accuracy=served.accuracy,
        speech=raw_file.Speech(manifest=str(grid.manifest), format=_file_format(grid), clips=grid.clips),
        others_busy_cores=busy,
        batches=found.batches,
        cpu_ms_per_clip=found.cpu_ms_per_clip() if sweep.target.pid else None,
        **sweep.facts,
    )
    try:
        configuration = digest(sweep.target, (*served.stages, cell.model))
    except RuntimeError:  # the server has ended since
        if found.report is not None:
            result.write(folder / RESULT)
        raise
    if configuration != served.configuration:
        raise RuntimeError(
            f"{cell.model} must be served as it was when the sweep began, but has another version or configuration "
            f"since {cell.name}; name another folder (--out) for that"
        )
    result.write(folder / RESULT)
    if found.reason is not None:
        _check_transcribes(sweep, cell, found.reason)
    return result


def _run_once(sweep: Sweep, cell: Cell, folder: Path) -> _Attempt:
    """Run perf_analyzer in the cell's folder, and check transcripts before and after."""
    is_random = sweep.grid.models[cell.model].random_weights is not None
    most_cer = rounding_cer(cell.precision, sweep.facts["machine"]["accelerator"]) if is_random else 0.0
    found = _Attempt()
    try:
        cuts = _cut(sweep, cell.duration_s)
        expected = expect(sweep, cell)
        check_answers(sweep.target.client, cell, cuts, expected, most_cer)
        found.rate_per_s = find_rate(sweep.grid, sweep.done, cell)
        found.command = _write_command(sweep, cell, cuts, None if most_cer else expected, found.rate_per_s)
        before = _count(sweep, cell)
        cpu_s = _read_cpu_s(sweep)
        report = perf_analyzer.run(found.command, folder, sweep.grid.timeout_s)
        found.server_cpu_s = _read_cpu_s(sweep) - cpu_s  # before the statistics, which take a while to settle
        after = _count(sweep, cell)
        check_answers(sweep.target.client, cell, cuts, expected, most_cer)
        counted = {stage: after[stage].since(before[stage]).batches for stage in before}
        if sweep.facts["one_server"]:
            _check_counted(sweep, cell, report, counted["acoustic"])
            found.report, found.batches = report, counted
        else:
            found.report = replace(report, stages=None)
    except (CellError, LoadError, perf_analyzer.PerfAnalyzerError) as error:
        found.reason = str(error)
    return found


def _check_transcribes(sweep: Sweep, cell: Cell, reason: str) -> None:
    """Check after a failure that the server still transcribes: Triton calls a model ready whose process has died.

    Raises:
        RuntimeError: It does not within :data:`RECOVERY_S`, so that no later cell can be measured.
    """
    if (cell.model, cell.duration_s) not in sweep.expected:
        return
    deadline = time.monotonic() + RECOVERY_S
    while True:
        try:
            transcribe_file(sweep.target.client, cell.model, _cut(sweep, cell.duration_s)[0])
            return
        except LoadError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the server must transcribe what it transcribed before {cell.name}, which failed ({reason}), but "
                    f"does not: {error}; {sweep.target.say_how_to_go_on('start it again')}, and "
                    "--retry measures this one again"
                ) from error
        time.sleep(0.5)


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()


def _count(sweep: Sweep, cell: Cell) -> dict[str, StageStatistics]:
    """Return each stage's statistics, by its name without the model's prefix."""
    found = settle_statistics(sweep.target.client, sweep.models[cell.model].stages)
    return {stage.removeprefix(f"{cell.model}_"): counted for stage, counted in found.items()}


def _check_counted(sweep: Sweep, cell: Cell, report: perf_analyzer.Report, acoustic: Mapping[int, int]) -> None:
    """Check that the clips that perf_analyzer timed went through the acoustic stage of the server asked over gRPC.

    Raises:
        CellError: They did not, so another server answered.
    """
    timed = (report.requests or 1) * cell.batch
    if (counted := sum(size * count for size, count in acoustic.items())) < timed:
        raise CellError(
            f"all of `server` must be one server, but {sweep.target.urls[cell.protocol]} answered {timed} clips, and "
            f"{sweep.target.urls['grpc']} counted {counted}; name both endpoints of one server"
        )


def _read_cpu_s(sweep: Sweep) -> float:
    """Return the CPU seconds of the server so far; 0 if it runs elsewhere."""
    return measure_cpu_s(sweep.target.pid) if sweep.target.pid else 0.0


def _file_format(grid: Grid) -> Literal["flac", "wav"]:
    return grid.files.format if grid.files else "flac"


def _cut(sweep: Sweep, duration_s: float) -> list[Cut]:
    if duration_s not in sweep.cuts:
        grid = sweep.grid
        sweep.cuts = {duration_s: cut_equal(grid.manifest, duration_s, grid.clips, _file_format(grid))}
    return sweep.cuts[duration_s]


def expect(sweep: Sweep, cell: Cell) -> list[str]:
    """Transcribe each clip alone: a transcript must not depend on other clips, transport or load."""
    key = (cell.model, cell.duration_s)
    if key not in sweep.expected:
        sweep.expected[key] = [
            transcribe_file(sweep.target.client, cell.model, cut) for cut in _cut(sweep, cell.duration_s)
        ]
    return sweep.expected[key]


def _write_command(
    sweep: Sweep, cell: Cell, cuts: Sequence[Cut], expected: Sequence[str] | None, rate_per_s: float | None
) -> list[str]:
    grid = sweep.grid
    # perf_analyzer's own check sees every answer under load, but works only in these cells, and knows no rounding.
    checked = (cell.input, cell.protocol, cell.shared_memory, cell.poisson_share) == ("file", "grpc", "none", None)
    checked = checked and expected is not None
    data = sweep.scratch / f"{cell.input}_{cell.duration_s:g}s_{cell.model if checked else 'unchecked'}.json"
    if not data.is_file():
        if cell.input == "pcm":
            write_pcm(data, cuts)
        else:
            write_files(data, cuts, expected if checked else None)
    if rate_per_s is None:
        load = ["--concurrency-range", str(cell.concurrency)]
    else:
        load = ["--async", "--request-distribution", "poisson", "--request-rate-range", f"{rate_per_s:.3f}"]
    memory = [] if cell.shared_memory == "none" else ["--shared-memory", cell.shared_memory]
    return [
        *(str(sweep.program), "-v", "-m", cell.served_model),
        *("-i", cell.protocol, "-u", sweep.target.urls[cell.protocol]),
        *("--input-data", str(data), "-b", str(cell.batch), *memory, *load),
        *("--measurement-mode", "count_windows", "--measurement-request-count", str(grid.requests)),
        *("-s", f"{grid.stability_percent:g}", "-r", str(grid.windows)),
        *("--verbose-csv", "-f", perf_analyzer.REPORT),
    ]


def find_closed(grid: Grid, cell: Cell) -> Cell:
    """Find the cell whose throughput an open loop has a share of: the closed loop with most clients."""
    assert grid.files is not None
    return replace(cell, poisson_share=None, concurrency=max(grid.files.concurrency))


def find_rate(grid: Grid, done: Mapping[str, Result], cell: Cell) -> float | None:
    """Find the requests per second: the cell's share of the throughput of its closed loop; None if it is closed itself.

    Raises:
        CellError: The closed loop has none.
    """
    if cell.poisson_share is None:
        return None
    closed = find_closed(grid, cell)
    found = done.get(closed.name)
    if found is None or found.report is None or not found.report.windows:
        raise CellError(f"the rate is a share of {closed.name}'s throughput, but that cell has none")
    rate = found.clips_per_s
    if rate is None:  # unstable: its best window
        rate = max(window for window, _ in found.report.windows)
    return round(cell.poisson_share * rate, 3)
