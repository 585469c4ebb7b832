"""Triton's perf_analyzer: find it, run it once, and read its report.

Its traps (version 2.51, each seen):

* An ensemble gets one report per stage besides its own. Their names are the stage's name before the value of `-f`, so
  perf_analyzer runs in the report's folder.
* An unstable measurement leaves no report and exits with 2, so the windows are read from the printed output.
* Averages are reported only with `--verbose-csv` and without `--percentile`.
* `--request-count` rounds the throughput's time to seconds, so windows are counted instead.
* Its validation of answers fails for any batch above one, over HTTP unless every output is given, and in `--async`,
  where an answer is compared with what a later request expects.
* Without `--async`, an open loop becomes a closed one at four requests.
* Each request's inputs are copied into its record, 17 MB for a batch of 16 clips of 16.7 s of PCM, so windows are kept
  short.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from carnelian_perf.raw_file import Split

REPORT = "report.csv"
WORDS = "perf_analyzer.txt"
PERCENTILES = ("p50", "p90", "p95", "p99")
_UNSTABLE_STATUS = 2
_PASS = re.compile(r"Pass \[\d+\] throughput: ([\d.]+) infer/sec\. Avg latency: (\d+) usec")
_REQUESTS = re.compile(r"^ +Request count: (\d+)$", re.MULTILINE)
_DELAYED = re.compile(r"([\d.]+)% of the requests were delayed")


class PerfAnalyzerError(RuntimeError):
    """There is no perf_analyzer, or it failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one run of perf_analyzer."""

    status: Literal["stable", "unstable"]
    windows: list[tuple[float, float]]
    """Each window's clips per second and mean latency in milliseconds."""
    latency_ms: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """avg, p50, p90, p95 and p99 of a request's latency; None if unstable."""
    clips_per_s: float | None = None
    """Throughput; None if unstable. Up to 5 % too low: windows are whole seconds, and requests that lie across their
    ends are not counted."""
    client_ms: dict[str, float] | None = None
    """Milliseconds of the mean request at the client: send, network, recv; None if unstable."""
    stages: dict[str, Split] | None = None
    """Stage's model name -> time of the mean request; None if unstable. The ensemble, their sum, is left out."""
    delayed_percent: float
    """Percentage of an open loop's requests that were sent late, because perf_analyzer did not keep up."""
    requests: int | None = None
    """Number of requests that were timed; None if unstable."""

    def __post_init__(self) -> None:
        """Refuse a stable report that lacks latencies or throughput."""
        missing = {"avg", *PERCENTILES} - set(self.latency_ms or ())
        if self.status == "stable" and (missing or self.clips_per_s is None):
            raise ValueError(f"a stable one lacks {', '.join(sorted(missing)) or 'clips_per_s'}")


def find_perf_analyzer() -> Path:
    """Find the program on PATH or beside this interpreter.

    Raises:
        PerfAnalyzerError: it is in neither place.
    """
    beside = Path(sys.executable).parent / "perf_analyzer"
    found = shutil.which("perf_analyzer") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise PerfAnalyzerError(
            "Triton's perf_analyzer must be on PATH or beside the interpreter, but is not: in a clone of Carnelian, "
            "`make perf-analyzer` (or `setup/perf-analyzer BIN`) puts it there; Triton's SDK container has it"
        )
    return Path(found).absolute()


def find_version(program: Path) -> str:
    """Ask perf_analyzer for its version.

    Raises:
        PerfAnalyzerError: The program does not start.
    """
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise PerfAnalyzerError(
            f"{program} must start, but says: {result.stderr.strip()}; try `make perf-analyzer` in a clone of Carnelian"
        )
    return (result.stdout or result.stderr).strip().removeprefix("Perf Analyzer Version ")


def run(command: Sequence[str], folder: Path, timeout_s: float) -> Report:
    """Run perf_analyzer in a folder and keep what it wrote there.

    Raises:
        PerfAnalyzerError: it failed, or took longer than `timeout_s`.
    """
    # A sweep that is killed takes it along: its requests would be measured with the cell of the next sweep.
    if setpriv := shutil.which("setpriv", path=os.defpath):
        command = [setpriv, "--pdeathsig=KILL", *command]
    words_path = folder / WORDS
    with words_path.open("w", encoding="utf-8") as words:
        try:
            result = subprocess.run(
                command, cwd=folder, stdout=words, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise PerfAnalyzerError(f"perf_analyzer must end within `timeout_s`, {timeout_s:g} s") from error
    said = words_path.read_text(encoding="utf-8", errors="replace")
    if result.returncode == _UNSTABLE_STATUS and "stable measurement" in said:
        return Report(status="unstable", windows=_find_windows(said), delayed_percent=_find_delayed(said))
    if result.returncode or not (folder / REPORT).is_file():
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()[-3:]
        raise PerfAnalyzerError(f"perf_analyzer ended with {result.returncode}: {' '.join(dict.fromkeys(lines))}")
    return _read_report(folder, said)


def _read_report(folder: Path, said: str) -> Report:
    names = ("send", "network", "recv")
    of_client = ("Client Send", "Network+Server Send/Recv", "Client Recv")
    columns = ("Inferences/Second", "Avg latency", *(f"{name} latency" for name in PERCENTILES), *of_client)
    rate, *times_us = _read_row(folder / REPORT, columns)
    times_ms = [time_us / 1e3 for time_us in times_us]
    return Report(
        status="stable",
        windows=_find_windows(said),
        latency_ms=dict(zip(("avg", *PERCENTILES), times_ms[:5], strict=True)),
        clips_per_s=rate,
        client_ms=dict(zip(names, times_ms[5:], strict=True)),
        stages={path.name.rpartition("_v")[0]: _read_split(path) for path in sorted(folder.glob(f"*_v*.{REPORT}"))},
        delayed_percent=_find_delayed(said),
        requests=find_requests(said),
    )


def find_requests(said: str) -> int | None:
    """Find in perf_analyzer's output how many requests it timed; None if the output does not say so."""
    found = _REQUESTS.search(said)
    return int(found[1]) if found else None


def _read_split(path: Path) -> Split:
    columns = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")
    return Split(*(time_us / 1e3 for time_us in _read_row(path, columns)))


def _read_row(path: Path, columns: Sequence[str]) -> list[float]:
    """Read columns of a report's only row."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != 1:
        raise PerfAnalyzerError(f"{path} must have one row, but has {len(rows)}")
    try:
        return [float(rows[0][column]) for column in columns]
    except (KeyError, TypeError, ValueError) as error:
        raise PerfAnalyzerError(
            f"{path} must have numbers in {', '.join(columns)}, as of perf_analyzer 2.51, but has {rows[0]}"
        ) from error


def _find_windows(said: str) -> list[tuple[float, float]]:
    return [(float(rate), float(latency) / 1e3) for rate, latency in _PASS.findall(said)]


def _find_delayed(said: str) -> float:
    found = _DELAYED.search(said)
    return float(found[1]) if found else 0.0
