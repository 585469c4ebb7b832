"""NeMo manifests, of which a measurement needs less than training does: whole files, with or without their texts."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Utterance:
    """A line of a manifest."""

    audio_filepath: Path
    duration_s: float
    text: str
    """Empty where the line has none."""
    source: str | None


def read_manifest(path: Path, *, with_texts: bool) -> list[Utterance]:
    """Read a NeMo manifest; relative audio paths are taken from its own folder, and `~` is the home folder.

    Raises:
        ValueError: The file cannot be read, or a line lacks a field or is of a part of a file.
    """
    fields = "`audio_filepath`, `duration` and `text`" if with_texts else "`audio_filepath` and `duration`"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"a manifest must be a file, but {path} cannot be read: {error.strerror}") from error
    utterances = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            audio = path.parent / Path(row["audio_filepath"]).expanduser()
            text, source, offset = row["text"] if with_texts else "", row.get("source"), row.get("offset")
            utterances.append(Utterance(audio, float(row["duration"]), str(text), source and str(source)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: a line must be a JSON object with {fields}, but is not: {error!r}"
            ) from error
        if offset:
            raise ValueError(
                f"{path}, line {number}: a clip must be a whole file, but begins {offset} s into one (`offset`); "
                "write the segments to files of their own"
            )
    return utterances
