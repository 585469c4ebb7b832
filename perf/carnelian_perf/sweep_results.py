"""The result file of one cell of a sweep."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from carnelian_perf.grid import Cell
from carnelian_perf.perf_analyzer import Report, Split

SUBJECT = "sweep"
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of perf_analyzer, or why there is none."""

    subject: str = SUBJECT
    cell: Cell
    status: Literal["stable", "unstable", "failed"]
    reason: str | None
    """Why it failed."""
    report: Report | None
    """What perf_analyzer found, unless it failed."""
    date: str
    """UTC, ISO 8601."""
    command: list[str]
    """perf_analyzer's, as it was run."""
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    backend: str
    """Of the acoustic stage."""
    accuracy: dict[str, float]
    """wer, cer, utterances and words of the manifest's whole clips, through the same server; empty of a network with
    random weights."""
    speech: dict[str, Any]
    """Where the clips are from."""
    others_busy_cores: float
    """Cores that other processes kept busy just before the run."""
    batches: dict[str, dict[int, int]]
    """Stage -> batch size -> executions, perf_analyzer's warm-up included."""
    cpu_ms_per_clip: float | None
    """CPU time of the whole server, all cores together; None of a server that was not started here."""

    @property
    def rtfx(self) -> float | None:
        """Seconds of audio per second, if stable."""
        if self.report is None or self.report.clips_per_s is None:
            return None
        return self.report.clips_per_s * self.cell.duration_s

    def write(self, folder: Path) -> None:
        """Write the result file, whole or not at all."""
        path = folder / RESULT
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a result file.

        Raises:
            ValueError: it is none.
        """
        try:
            fields = json.loads(path.read_text())
            fields["cell"] = Cell(**fields["cell"])
            fields["report"] = fields["report"] and _read_report(fields["report"])
            fields["batches"] = {
                stage: {int(size): count for size, count in sizes.items()} for stage, sizes in fields["batches"].items()
            }
            return cls(**fields)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} must be a result of `carnelian-perf {SUBJECT}`, but is not: {error!r}; delete it and run the "
                "sweep again"
            ) from error


def read_results(folder: Path) -> list[Result]:
    """Read all results of a sweep's folder, by name of the cell.

    Raises:
        ValueError: there are none, or a file is none.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(
            f"a sweep's folder must be named, as `carnelian-perf sweep` makes it; {folder} has no */{RESULT}"
        )
    return [Result.read(path) for path in paths]


def _read_report(fields: dict[str, Any]) -> Report:
    fields["windows"] = [tuple(window) for window in fields["windows"]]
    fields["stages"] = fields["stages"] and {stage: Split(**split) for stage, split in fields["stages"].items()}
    return Report(**fields)
