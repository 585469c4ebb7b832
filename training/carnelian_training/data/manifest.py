"""NeMo manifests: one JSON object per line with `audio_filepath`, `duration` (s), `text` and optionally `offset` (s).

NeMo and DALI's `readers.nemo_asr` read this format. Other fields of a line (`speaker`, `source`, ...) are kept in
`Clip.extra`.
"""

import codecs
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from carnelian_training.ctc.spelling import quote
from carnelian_training.replacement import replaced
from carnelian_training.text import to_given_labels

logger = logging.getLogger(__name__)

MOST_S = 1e6
"""Of a `duration` or `offset`, eleven days: more is no number of seconds."""
_OTHERS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "packed by gzip", b"[": "a JSON array"}
"""By their beginnings, files that are taken for JSON lines."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording and its transcript."""

    audio_filepath: Path
    duration: float
    """The duration of the clip in seconds, as the manifest says."""
    text: str
    """The transcript."""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The other fields of the manifest's line: `speaker`, `source`, ..."""
    offset: float | None = field(default=None, kw_only=True)
    """The place in the file where the clip begins, in seconds; None: the clip is the whole file."""

    @property
    def title(self) -> str:
        """The name of the clip in errors and in the log: its file, in one line, and, for a segment, its offset."""
        file = "".join(c if c.isprintable() else repr(c)[1:-1] for c in f"{self.audio_filepath}")
        return file + ("" if self.offset is None else f" at {self.offset:g} s")


def read_manifest(path: Path) -> list[Clip]:
    """Read a manifest; relative audio paths start at the manifest's own folder, and ``~`` is the user's home.

    White space within a transcript becomes one space; white space around it is removed.

    Raises:
        ValueError: The file cannot be read, or a line is not a clip; the message says file, line and what was found.
    """
    return [parse_line(line, path.parent, where) for where, line in _lines(path)]


def read_manifest_leniently(path: Path) -> tuple[list[Clip], list[str]]:
    """Read a manifest as :func:`read_manifest` does; return its clips, and a message for each line that is not a clip.

    Raises:
        ValueError: The file cannot be read.
    """
    clips, mistakes = [], []
    for where, line in _lines(path):
        try:
            clips.append(parse_line(line, path.parent, where))
        except ValueError as error:
            mistakes.append(str(error))
    return clips, mistakes


def read_clips(manifest: Path) -> list[Clip]:
    """Read a manifest that must not be empty.

    Raises:
        ValueError: The file is not a manifest, or names no clips.
    """
    clips = read_manifest(manifest)
    if not clips:
        raise ValueError(f"a manifest must name at least one clip, but {manifest} has none")
    return clips


def clips_to_evaluate(manifest: Path) -> list[Clip]:
    """Read a manifest whose transcripts are references for evaluation.

    Raises:
        ValueError: The file is not a manifest, or its transcripts have no words.
    """
    clips = read_clips(manifest)
    if not any(clip.text.split() for clip in clips):
        raise ValueError(f"a manifest to evaluate on must hold at least one word, but {manifest} has none")
    return clips


def warn_of_characters(clips: Sequence[Clip], labels: Sequence[str]) -> None:
    """Log a warning if references have characters that are not labels, such as capitals; these count as errors."""
    outside = {clip.text: others for clip in clips if (others := set(" ".join(clip.text.split())) - set(labels))}
    if outside:
        mended = sum(bool(to_given_labels(clip.text, "".join(labels))) for clip in clips if clip.text in outside)
        logger.warning(
            "%d of %d references hold characters outside the labels, which count as errors: %s%s",
            sum(clip.text in outside for clip in clips),
            len(clips),
            quote("".join(sorted(set.union(*outside.values())))),
            f"; `to_given_labels` can write {mended} of them" if mended else "",
        )


def write_manifest(path: Path, clips: Iterable[Clip]) -> None:
    """Write a manifest atomically: a reader sees the old file or the new one, never a part.

    Paths of audio files below the manifest's folder are written relative to it, so that the folder can be moved.
    """
    folder = path.parent.absolute()
    with replaced(path) as partial, partial.open("w", encoding="utf-8") as file:
        for clip in clips:
            audio = clip.audio_filepath.absolute()
            if audio.is_relative_to(folder):
                audio = audio.relative_to(folder)
            row = {"audio_filepath": audio.as_posix(), "duration": clip.duration, "text": clip.text}
            row |= {} if clip.offset is None else {"offset": clip.offset}
            file.write(json.dumps(row | dict(clip.extra), ensure_ascii=False) + "\n")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines that are not blank, each after a string that says its file and line number."""
    with _opened(path) as lines:
        _check_kind(path, lines.peek())
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def _check_kind(path: Path, start: bytes) -> None:
    """Check that a file does not begin as one of another kind, every line of which would be an error.

    One bad line before an object is a mistake in a manifest.
    """
    lines = [line for part in start.removeprefix(codecs.BOM_UTF8).split(b"\n") if (line := part.strip())]
    first, second, *_ = [*lines, b"", b""]
    kinds = [kind for magic, kind in _OTHERS.items() if first.startswith(magic)]
    kinds += ["a binary file"] if b"\0" in first else []
    if not second.startswith(b"{"):
        kinds += ["JSON over several lines"] if first == b"{" else []
        kinds += [f"text that begins with {first[:30]!r}"] if first[:1] not in (b"", b"{") else []
    if kinds:
        raise ValueError(f"{path} must be a manifest, one JSON object a line in UTF-8, but is {kinds[0]}: convert it")


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        place = "" if path.is_absolute() else f" (in the working directory, {Path.cwd()})"
        raise ValueError(f"{path} must be a manifest, JSON lines{place}, but: {error.strerror}") from error


def parse_line(line: bytes, folder: Path, where: str) -> Clip:
    """Make a clip of a line of a manifest in a folder.

    Raises:
        ValueError: The line is not a clip; the message begins with `where` and says what was found.
    """
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too many digits in a number; too deep
        advice = "; convert the file to UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ValueError(f"{where}: a line must be one JSON object, but it does not parse: {error}{advice}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a line must be one JSON object, found {type(row).__name__}")
    # JSON may write a character above U+FFFF as two surrogates. One surrogate alone parses, but cannot be encoded.
    if b"\\ud" in line.lower() or b"\xed" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: a line must be Unicode text, but has half of a pair, {half!r}") from error
    audio = row.pop("audio_filepath", None)
    if not isinstance(audio, str) or not audio or "\0" in audio or "://" in audio:
        raise ValueError(f"{where}: `audio_filepath` must be the path of a sound file, found {audio!r:.200}")
    duration = row.pop("duration", None)
    if not _is_number(duration) or not 0 < duration <= MOST_S:
        raise ValueError(
            f"{where}: `duration` must be a positive number of seconds, at most {MOST_S:.0f}, found {duration!r:.200}"
        )
    offset = row.pop("offset", None)
    if offset is not None and (not _is_number(offset) or not 0 <= offset <= MOST_S):
        raise ValueError(
            f"{where}: `offset` must be a number of seconds into the file, at most {MOST_S:.0f}, found {offset!r:.200}"
        )
    text = row.pop("text", None)
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: `text` must be the clip's transcript, a string (empty without one), found {text!r:.200}"
        )
    text = " ".join(text.split())  # as evaluation splits words; otherwise training would learn tabs and newlines
    file = Path(audio)
    if file.parts[:1] == ("~",):
        file = file.expanduser()
    return Clip(folder / file, float(duration), text, row, offset=None if offset is None else float(offset))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict, and raise ValueError if a key occurs twice; by default `json` silently takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key must come once, but {max(keys, key=keys.count)!r:.200} does not")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
