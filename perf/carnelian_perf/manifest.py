"""Reads NeMo manifests of whole files, with or without their texts.

Error rates must be those of `carnelian-train evaluate`, so lines are read by the rules of
`carnelian_training.data.manifest`. Its distribution brings torch, which a light install lacks; one test holds both to
the same rules.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

MOST_S = 1e6
"""The largest `duration` or `offset` in seconds, as in training: more is no number of seconds."""
ROUNDING_S = 0.05
"""How many seconds longer than its `duration` a file may be and still count as whole."""


@dataclass(frozen=True)
class Utterance:
    """A line of a manifest."""

    audio_filepath: Path
    duration_s: float
    text: str
    """The transcript with single spaces; empty if texts are not asked for."""
    source: str | None


def read_manifest(path: Path, *, with_texts: bool) -> list[Utterance]:
    """Read a NeMo manifest as training does: relative audio paths start at its own folder, `~` is the user's home.

    Raises:
        ValueError: The file cannot be read, or a line is not a clip, or its clip is only a part of a file; the message
            names the file, the line and what was found.
    """
    try:
        with path.open("rb") as file:
            lines = list(file)
    except OSError as error:
        raise ValueError(f"a manifest must be a file, but {path} cannot be read: {error.strerror}") from error
    return [
        _parse_line(line, path.parent, f"{path}, line {number}", with_texts)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_line(line: bytes, folder: Path, where: str, with_texts: bool) -> Utterance:
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # no JSON or UTF-8, or a number of too many digits; nested too deep
        raise ValueError(f"{where}: a line must be one JSON object, but it does not parse: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a line must be one JSON object, found {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may spell a character above U+FFFF as two surrogates
        half = error.object[error.start]
        raise ValueError(f"{where}: a line must be Unicode text, but has half of a pair, {half!r}") from error
    audio, duration, offset, source = map(row.get, ("audio_filepath", "duration", "offset", "source"))
    text = row.get("text") if with_texts else ""
    if not isinstance(audio, str) or not audio or "\0" in audio:
        raise ValueError(f"{where}: `audio_filepath` must be the path of a sound file, found {audio!r:.200}")
    if not _is_number(duration) or not 0 < duration <= MOST_S:
        raise ValueError(
            f"{where}: `duration` must be a positive number of seconds, at most {MOST_S:.0f}, found {duration!r:.200}"
        )
    if offset is not None and (not _is_number(offset) or not 0 <= offset <= MOST_S):
        raise ValueError(
            f"{where}: `offset` must be a number of seconds into the file, at most {MOST_S:.0f}, found {offset!r:.200}"
        )
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: `text` must be the clip's transcript, a string (empty without one), found {text!r:.200}"
        )
    file = Path(audio)
    file = folder / (file.expanduser() if file.parts[:1] == ("~",) else file)
    # Training takes a clip with an offset, even of 0, as a part of its file.
    if offset or (offset is not None and _lasts_longer(file, duration)):
        raise ValueError(
            f"{where}: a clip must be a whole file, but is {duration:g} s that begin {offset} s into one (`offset`); "
            "write the segments to files of their own"
        )
    return Utterance(file, float(duration), " ".join(text.split()), None if source is None else str(source))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object in which each key comes once; Python's reader silently takes the last of equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key must come once, but {max(keys, key=keys.count)!r:.200} does not")
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lasts_longer(file: Path, duration_s: float) -> bool:
    """Return whether a file is longer than a duration by more than rounding; False if the file cannot be read here."""
    try:
        import soundfile  # `accuracy` works without it

        return bool(soundfile.info(file).duration > duration_s + ROUNDING_S)
    except (ImportError, OSError, RuntimeError):
        return False
