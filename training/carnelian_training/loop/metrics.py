"""The records of a run, one for each log line and each evaluation: `metrics.jsonl` in its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carnelian_training.config_errors import shown
from carnelian_training.replacement import write_text

METRICS = "metrics.jsonl"
TIE = 1e-6
"""The weight of CER in :func:`error_of`: with CER below 100, less than the 1e-4 to which `metrics.jsonl` rounds WER."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a run, in order; an incomplete last line, as a killed run leaves it, is dropped.

    Raises:
        ValueError: The file cannot be read, or a line is not a record of a run; the message names file and line.
    """
    records = []
    try:
        content = path.read_bytes()
    except OSError as error:
        advice = f": give {path / METRICS}" if path.is_dir() and path.name != METRICS else ""
        raise ValueError(f"{path} must be `{METRICS}` of a run, but: {error.strerror}{advice}") from error
    # As bytes, because text would also be split at U+2028, which the name of a source may contain.
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair parses, but cannot be written
            if type(record["step"]) is not int:
                raise TypeError("`step` is no whole number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            found = shown(line.decode(errors="replace"))
            raise ValueError(
                f"{path}, line {number}: must be a JSON object with `step`, a whole number, but is {found}"
            ) from error
        records.append(record)
    return records


def drop_after(path: Path, step: int, evaluated_step: int) -> None:
    """Drop records of steps after `step` and of evaluations after `evaluated_step`, which the run will repeat."""
    if not path.exists():
        return
    kept = [
        record
        for record in read_metrics(path)
        if record["step"] <= (evaluated_step if any(name.startswith("dev_") for name in record) else step)
    ]
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def error_of(record: Mapping[str, float]) -> float:
    """Return the error to compare evaluations by: WER, with CER to break ties, or CER alone if there is no WER."""
    cer = record["dev_cer"]
    return record["dev_wer"] + TIE * cer if "dev_wer" in record else cer
