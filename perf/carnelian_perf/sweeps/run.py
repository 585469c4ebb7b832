"""Run the cells of a grid that have no result yet; refuse what does not fit the results that are there."""

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from carnelian_perf.load import LoadError
from carnelian_perf.machine import describe_machine, find_commit, find_versions
from carnelian_perf.stages import is_one_server
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.grid import Cell, CellError, Grid, check_files, check_same, check_same_subject, list_cells
from carnelian_perf.sweeps.lock import alone_in
from carnelian_perf.sweeps.measure import Sweep, expect, find_closed, find_rate, measure
from carnelian_perf.sweeps.results import RESULT, SEVERAL_SERVERS, Result, read_grid_of, read_result, write_grid
from carnelian_perf.sweeps.target import check_http, examine, open_target

LOGGER = logging.getLogger(__name__)
OTHER_MODEL = ": another model is served, or the same otherwise, or another version of carnelian-perf wrote them"


def run_grid(grid: Grid, out: Path, retry: bool = False) -> list[Result]:
    """Measure the cells that have no result yet.

    Args:
        grid: What to measure.
        out: The sweep's folder; each cell has a folder of its own name in it.
        retry: Measure unstable and failed cells again.

    Returns:
        The results of all cells, earlier ones included.

    Raises:
        PerfAnalyzerError: there is no perf_analyzer.
        RuntimeError: the server could not be started or no longer answers, lacks a model, caches its answers, or has
            another version since the sweep began.
        ValueError: a file of the grid does not exist, the manifest has no clips or one cannot be opened, a cell's file
            is no result, earlier results in the folder are of another machine, other versions, another server or other
            clips, or another sweep works in the folder.
    """
    program = perf_analyzer.find_perf_analyzer()
    with alone_in(out):
        return _run_alone(grid, out, retry, program)


def _run_alone(grid: Grid, out: Path, retry: bool, program: Path) -> list[Result]:
    cells = list_cells(grid)
    if (earlier := read_grid_of(out)) and any(out.glob(f"*/{RESULT}")):
        check_same_subject(grid, earlier)
    there = [path.parent for path in sorted(out.glob(f"*/{RESULT}"))]
    done = {folder.name: result for folder in there if (result := _find_result(folder, retry))}
    versions = {**find_versions(), "perf_analyzer": perf_analyzer.find_version(program)}
    versions.pop("tritonserver", None)  # the server that is measured tells its own, which results hold
    facts: dict[str, Any] = {"commit": find_commit(), "machine": describe_machine(), "versions": versions}
    _check_same_origin(done.values(), facts, grid)
    missing = [cell for cell in cells if _is_missing(grid, done, cell)]
    # A server that is named may serve other models by now, whose numbers the results that are there are not.
    examined = cells if grid.server else missing
    if examined:
        check_files(grid)
    write_grid(grid, out)  # even if no cell is missing: it may have become smaller
    measured = 0
    if examined:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carnelian-perf-")))
            target = stack.enter_context(open_target(grid, scratch))
            versions["tritonserver"] = target.ask(target.client.get_server_metadata).version
            if "http" in grid.protocols:
                check_http(target.urls["http"])
            _check_same_origin(done.values(), facts, grid)
            sweep = Sweep(grid=grid, out=out, target=target, program=program, scratch=scratch, facts=facts, done=done)
            sweep.models = {model: examine(target, grid, model) for model in dict.fromkeys(c.model for c in examined)}
            for result in done.values():
                if served := sweep.models.get(result.cell.model):
                    check_same(result.served, vars(served), f"{{}} of {result.cell.model}", OTHER_MODEL)
            facts["one_server"] = grid.server is None or is_one_server(grid.server.grpc, examined[0].model)
            if not facts["one_server"]:
                LOGGER.warning("%s For those name a single one as `server.grpc`.", SEVERAL_SERVERS)
            for cell in missing:  # before any is measured: the models are those that `examine` saw
                with contextlib.suppress(LoadError):  # the cell itself will fail, too
                    expect(sweep, cell)
            for cell in tqdm(missing, desc=grid.name, unit="cell", disable=None):
                if not _is_missing(grid, done, cell):  # its closed loop, measured just now, gave no other rate
                    continue
                done[cell.name] = result = measure(sweep, cell)
                measured += 1
                LOGGER.info("%s: %s", cell.name, result.describe())
    LOGGER.info("%d cells measured now, %d were there", measured, len(cells) - measured)
    return [done[cell.name] for cell in cells]


def _find_result(folder: Path, retry: bool) -> Result | None:
    if not (folder / RESULT).is_file():
        return None
    try:
        result = read_result(folder)
    except ValueError as error:
        raise ValueError(f"{error}; delete it, and its cell is measured again") from error
    return None if retry and result.status != "stable" else result


def _check_same_origin(results: Iterable[Result], facts: Mapping[str, Any], grid: Grid) -> None:
    """Check that results are of this machine, of the versions that are known here, and of files in the grid's format.

    Raises:
        GridError: A result is not; the message names what differs.
    """
    for result in results:
        check_same(result.origin, {**facts["machine"], **facts["versions"]})
        if grid.files:
            check_same(result.served, {"format": grid.files.format}, "`files.{}` of the grid")


def _is_missing(grid: Grid, done: Mapping[str, Result], cell: Cell) -> bool:
    """Whether a cell has no result, or one of another rate than it would have now; a closed loop has no rate."""
    if cell.name not in done:
        return True
    if (rate := done[cell.name].rate_per_s) is None:
        return False
    if find_closed(grid, cell).name not in done:
        return True  # as far as is known: its closed loop is measured first
    try:
        return rate != find_rate(grid, done, cell)
    except CellError:  # there is no other rate to measure at
        return False
