"""NeMo manifests: one JSON object per line with `audio_filepath`, `duration` (s) and `text`.

The form that NeMo, DALI's `readers.nemo_asr` and the DeepLearningExamples tools read. Other fields of a line
(`speaker`, `source`, ...) travel along in `Clip.extra`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Clip:
    """One recording and its transcript."""

    audio_filepath: Path
    duration: float
    """Seconds."""
    text: str
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else the line says: `speaker`, `source`, ..."""


def read_manifest(path: Path) -> list[Clip]:
    """Read a manifest; relative audio paths are taken from the manifest's own folder.

    Raises:
        ValueError: A line is not a clip; the message names the file, the line and what was found.
    """
    folder = path.parent
    clips = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                clips.append(_parse_line(line, folder, f"{path}, line {number}"))
    return clips


def write_manifest(path: Path, clips: Iterable[Clip]) -> None:
    """Write a manifest in one step: a reader sees the old file or the new one, never half of one.

    Audio below the manifest's folder is written relative to it, so that the folder can be moved.
    """
    folder = path.parent.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for clip in clips:
                audio = clip.audio_filepath.absolute()
                if audio.is_relative_to(folder):
                    audio = audio.relative_to(folder)
                row = {"audio_filepath": audio.as_posix(), "duration": clip.duration, "text": clip.text}
                file.write(json.dumps(row | dict(clip.extra), ensure_ascii=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _parse_line(line: str, folder: Path, where: str) -> Clip:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: a line must be one JSON object, but it does not parse: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a line must be one JSON object, found {type(row).__name__}")
    audio = row.pop("audio_filepath", None)
    if not isinstance(audio, str) or not audio:
        raise ValueError(f"{where}: `audio_filepath` must be the path of a sound file, found {audio!r}")
    duration = row.pop("duration", None)
    is_number = isinstance(duration, (int, float)) and not isinstance(duration, bool)
    if not is_number or not math.isfinite(duration) or duration <= 0:
        raise ValueError(f"{where}: `duration` must be a positive number of seconds, found {duration!r}")
    text = row.pop("text", None)
    if not isinstance(text, str):
        raise ValueError(f"{where}: `text` must be the clip's transcript, a string, found {text!r}")
    return Clip(folder / audio, float(duration), text, row)
