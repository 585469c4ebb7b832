"""NeMo manifests, of which a measurement needs less than training does: whole files, with or without their texts."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

ROUNDING_S = 0.05
"""How many seconds longer than its `duration` a file may be and still count as whole."""


@dataclass(frozen=True)
class Utterance:
    """A line of a manifest."""

    audio_filepath: Path
    duration_s: float
    text: str
    """Empty where texts are not asked for."""
    source: str | None


def read_manifest(path: Path, *, with_texts: bool) -> list[Utterance]:
    """Read a NeMo manifest as training does: relative audio paths start at its own folder, `~` is the user's home.

    Raises:
        ValueError: The file cannot be read, or a line is not a clip, or its clip is only a part of a file; the message
            names the file, the line and what was found.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"a manifest must be a file, but {path} cannot be read: {error.strerror}") from error
    return [
        _parse_line(line, path.parent, f"{path}, line {number}", with_texts)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_line(line: bytes, folder: Path, where: str, with_texts: bool) -> Utterance:
    try:
        row = json.loads(line)
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{where}: a line must be one JSON object, but it does not parse: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a line must be one JSON object, found {type(row).__name__}")
    audio, duration, offset, source = map(row.get, ("audio_filepath", "duration", "offset", "source"))
    text = row.get("text") if with_texts else ""
    if not isinstance(audio, str) or not audio:
        raise ValueError(f"{where}: `audio_filepath` must be the path of a sound file, found {audio!r}")
    if not isinstance(duration, (int, float)) or isinstance(duration, bool) or not 0 < duration < math.inf:
        raise ValueError(f"{where}: `duration` must be a positive number of seconds, found {duration!r}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: `text` must be the clip's transcript, a string, found {text!r}")
    file = Path(audio)
    file = folder / (file.expanduser() if file.parts[:1] == ("~",) else file)
    # Training takes a clip with an offset, even of 0, as a part of its file.
    if offset or (offset is not None and _lasts_longer(file, duration)):
        raise ValueError(
            f"{where}: a clip must be a whole file, but is {duration:g} s that begin {offset} s into one (`offset`); "
            "write the segments to files of their own"
        )
    return Utterance(file, float(duration), text, None if source is None else str(source))


def _lasts_longer(file: Path, duration_s: float) -> bool:
    """Whether a file is longer than a duration by more than rounding; False if the file cannot be read here."""
    try:
        import soundfile  # `accuracy` works without it

        return bool(soundfile.info(file).duration > duration_s + ROUNDING_S)
    except (ImportError, OSError, RuntimeError):
        return False
