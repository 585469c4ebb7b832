"""What `carnelian-transcribe` writes: to the standard output, whatever its encoding, or files, whole or not at all."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ._formats import CONTROLS, FORMATTING, render

if TYPE_CHECKING:
    from ._files_cli import Clip
    from ._types import Transcript

# For names, which share lines with transcripts.
_ESCAPES = CONTROLS | {ord("\\"): r"\\"}


class OutputError(OSError):
    """A transcript cannot be printed or written."""


def print_text(text: str) -> None:
    """Print what was heard in a file.

    Raises:
        BrokenPipeError: nobody reads on, as after `| head`.
        OutputError: the standard output cannot be written.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, f"the standard output cannot be written: {error.strerror}") from error


def print_transcript(transcript: Transcript, clip: Clip, kind: str, *, with_name: bool) -> None:
    """Print a transcript, as text after its file's name if that is wanted; raise what `print_text` raises."""
    name = f"{clip.file.translate(_ESCAPES)}\t" if kind == "text" and with_name else ""
    print_text(name + _render(transcript, kind, clip.file))


def write_transcript(transcript: Transcript, clip: Clip, *, may_replace: bool) -> None:
    """Write a transcript in each format that the clip has a file for.

    Raises:
        OutputError: a file cannot be written, or is there and must not be replaced.
    """
    for kind, target in clip.targets.items():
        # In JSON, a file's name that is no text is escaped; elsewhere it is as the system has it.
        encoding_errors = "carnelian-json" if kind == "json" else "surrogateescape"
        try:
            if not may_replace and os.path.lexists(target):  # since the run began: another one has written it
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            _replace(target, _render(transcript, kind, clip.file).encode(errors=encoding_errors))
        except OSError as error:
            raise OutputError(error.errno, f"{target} cannot be written: {error.strerror}") from error


def drop_unprinted(stream: TextIO) -> None:
    """Drop what could not be printed: Python would try once more at its end, and change the exit status and message."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def name_once(file: str, error: Exception) -> str:
    """Return an error's message with the file's name before it, unless it begins with that, as the SDK's errors do."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return text if text.startswith((f"{file}: ", f"{file}, from ")) else f"{file}: {text}"


def prepare_stdout(kind: str) -> None:
    """Let the standard output write all of a text or fail, and escape what it cannot encode.

    JSON and WebVTT must be UTF-8. Where a terminal is not, JSON has its escapes, which are right in both. With
    PYTHONUNBUFFERED, Python drops what a full disk or a slow pipe does not take.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        raw: object = sys.stdout.buffer
        if isinstance(raw, io.RawIOBase):
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, sys.stdout.errors)
        plain = {"strict": "backslashreplace", "surrogateescape": "carnelian"}
        encoding, errors = sys.stdout.encoding, sys.stdout.errors or "strict"
        if kind == "json":
            encoding, errors = "utf-8" if codecs.lookup(encoding).name == "utf-8" else "ascii", "carnelian-json"
        elif kind == "vtt":
            encoding = "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors=plain.get(errors, errors))


def _render(transcript: Transcript, kind: str, file: str) -> str:
    return render(transcript, kind, file).translate(FORMATTING)  # a label may be one


def _replace(target: Path, content: bytes) -> None:
    """Write a file whole or not at all: an earlier transcript stays if the disk has no room for this one."""
    if target.exists() and not target.is_file():  # a pipe, /dev/null
        target.write_bytes(content)
        return
    target = Path(os.path.realpath(target))  # a symbolic link stays one
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with partial.open("wb") as file:
            if target.exists():
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace a character that cannot be encoded: a byte of a file's name that is no text stays, others are escaped."""
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _spell_in_json(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded by JSON's escapes; they stand only in JSON's strings."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("carnelian", _spell)
codecs.register_error("carnelian-json", _spell_in_json)
