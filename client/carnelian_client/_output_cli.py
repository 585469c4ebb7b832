"""What `carnelian-transcribe` writes: to the standard output, whatever its encoding, or files, whole or not at all."""

from __future__ import annotations

import codecs
import io
import json
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ._formats import CONTROLS, FORMATTING, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._client import Outcome

# For names, which share lines with transcripts.
_ESCAPES = CONTROLS | {ord("\\"): r"\\"}


def deliver_all(
    outcomes: Iterator[Outcome], kind: str, files: list[str], targets: list[Path] | list[None]
) -> Iterator[str]:
    """Print or write the files' transcripts, and yield an error message for each that fails."""
    for file, target, outcome in zip(files, targets, outcomes, strict=True):
        name = f"{file.translate(_ESCAPES)}\t" if kind == "text" and len(files) > 1 and target is None else ""
        if failure := _deliver(outcome, kind, file, target, name):
            yield failure


def print_text(text: str, file: str) -> str | None:
    """Print what was heard in a file; return an error message if that cannot be done."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        raise
    except OSError as error:
        return f"{file}: the standard output cannot be written: {error.strerror}"
    return None


def drop_unprinted() -> None:
    """Drop what could not be printed: Python would try once more at its end, and change the exit status and message."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def _deliver(outcome: Outcome, kind: str, file: str, target: Path | None, name: str) -> str | None:
    """Print a transcript after `name`, or write it to `target`; return an error message if that cannot be done."""
    if isinstance(outcome, Exception):
        return name_once(file, outcome)
    text = render(outcome, kind, file).translate(FORMATTING)  # a label may be one
    if target is None:
        return print_text(name + text, file)
    try:
        # In JSON, a file's name that is no text is escaped; elsewhere it is as the system has it.
        _replace(target, text.encode(errors="carnelian-json" if kind == "json" else "surrogateescape"))
    except OSError as error:
        return f"{file}: {target} cannot be written: {error.strerror}"
    return None


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
