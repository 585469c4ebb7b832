"""The files of `carnelian-transcribe`: which audio it reads, and where the transcripts of each go."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import typer

from ._formats import CONTROLS, ctm_name

STDIN = "-"
SUFFIXES = {"text": "txt"}

Existing: TypeAlias = Literal["refuse", "skip", "replace"]
"""What to do where a file to write exists."""


@dataclass(frozen=True)
class Clip:
    """A file to transcribe."""

    file: str
    targets: Mapping[str, Path]
    """The file to write in each format; none if the transcript is printed."""


def all_names(files: list[str], list_name: str | None) -> list[str]:
    """Return the names of the files to transcribe: those of the command line, then those of a list.

    Raises:
        typer.BadParameter: there are none, or they cannot be read.
    """
    names = files + ([] if list_name is None else _listed(list_name))
    if not names:
        raise typer.BadParameter("FILE... or --files-from must name an audio file, but there is none")
    if STDIN in names:
        _stdin()
        if list_name == STDIN:
            raise typer.BadParameter("- must be audio or the list of --files-from, but is given as both")
    return names


def _listed(list_name: str) -> list[str]:
    """Read a list: of a name a line, or with a NUL behind each, as `find -print0` writes it."""
    try:
        content = _stdin().read() if list_name == STDIN else Path(list_name).read_bytes()
    except OSError as error:
        raise _wrong(
            f"--files-from must be a list of names, but {list_name} cannot be read: {error.strerror}"
        ) from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _wrong(f"--files-from must be a list in UTF-8, but {list_name} is in UTF-16, as PowerShell writes it")
    if b"\0" in content:
        lines = content.split(b"\0")
    else:  # which an editor of Windows may have written
        lines = [line.removesuffix(b"\r") for line in content.removeprefix(codecs.BOM_UTF8).split(b"\n")]
    names = [os.fsdecode(name) for name in lines if name.strip()]
    if not names:
        raise _wrong(f"--files-from must name a file in each line, but {list_name} has none")
    return names


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise typer.BadParameter("- must be the standard input, but it is closed")
    return sys.stdin.buffer


def check_ctm(files: list[str]) -> None:
    """Refuse files that could not be told apart in one CTM."""
    names = list(map(ctm_name, files))
    if pair := _first_pair(names, files):
        raise _wrong(
            "--format ctm must have files of different names, which are its first column, but "
            f"{pair[0]} and {pair[1]} are both {ctm_name(pair[1])}; --out writes a file for each"
        )


def place(
    files: list[str],
    kinds: tuple[str, ...],
    out: Path,
    root: Path | None,
    existing: Existing,
    list_name: str | None,
) -> tuple[list[Clip], int]:
    """Choose the files to write, and make their folders.

    Args:
        files: The audio files; a name that is given twice stands for one.
        kinds: The formats to write.
        out: The folder for them.
        root: The folder whose folders are kept in `out`; if None, all files are in `out` itself.
        existing: What to do with files that exist.
        list_name: The list of names, which is not replaced either.

    Returns:
        The files to transcribe, and how many are left out because nothing of theirs is left to write.

    Raises:
        typer.BadParameter: a file would be replaced, two would be the same, or one could not be written.
    """
    files = list(dict.fromkeys(files))
    places = [_place(file, root) for file in files]
    if pair := _first_pair(places, files):
        first, second = (os.path.dirname(os.path.abspath(file)) for file in pair)  # noqa: PTH100, PTH120  (as in _place)
        is_apart = root is None and first != second
        raise _wrong(
            f"--out must have files of different names, but {pair[0]} and {pair[1]} would both be "
            f"{_target(out, _place(pair[0], root), kinds[0])}"
            + ("; --root DIR keeps the folders below DIR" if is_apart else "")
        )
    clips = [
        Clip(file, {kind: _target(out, at, kind) for kind in kinds}) for file, at in zip(files, places, strict=True)
    ]
    if there := _existing(clips, list_name):
        if existing == "refuse":
            found = f"{there[0]} exists" if len(there) == 1 else f"{len(there)} exist, the first of them {there[0]}"
            raise _wrong(
                f"--out must not replace files, but {found}; --existing skip goes on with a run that was interrupted, "
                "--existing replace writes them anew"
            )
        if existing == "skip":
            done = set(there)
            left = [{kind: path for kind, path in clip.targets.items() if path not in done} for clip in clips]
            clips = [Clip(clip.file, targets) for clip, targets in zip(clips, left, strict=True) if targets]
    for folder in sorted({target.parent for clip in clips for target in clip.targets.values()}):
        _make_folder(folder)
    for folder in (target for clip in clips for target in clip.targets.values() if _is_folder(target)):
        raise _wrong(f"--out must have a file for each recording, but {folder} is a folder; move it away")
    return clips, len(files) - len(clips)


def _place(file: str, root: Path | None) -> str:
    """Return where below `out` a file's transcripts are, without their suffixes."""
    if file == STDIN:
        return "stdin"
    if root is None:
        return Path(file).stem
    # Links stay as they are, so that folders are kept as they were named.
    path, top = os.path.abspath(file), os.path.join(os.path.abspath(root), "")  # noqa: PTH100, PTH118
    if not path.startswith(top):
        raise _wrong(f"--root must be a folder above all files, but {file} is not below {root}")
    return os.path.splitext(path[len(top) :])[0]  # noqa: PTH122


def _target(out: Path, at: str, kind: str) -> Path:
    return out / f"{at}.{SUFFIXES.get(kind, kind)}"


def _first_pair(names: list[str], files: list[str]) -> tuple[str, str] | None:
    """Return the first two files that have the same name."""
    first: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        if name in first:
            return first[name], file
        first[name] = file
    return None


def _existing(clips: Iterable[Clip], list_name: str | None) -> list[Path]:
    """Return the targets that exist, also as links to nothing; refuse those that are one of the files to read."""
    targets = (target for clip in clips for target in clip.targets.values())
    there = [target for target in targets if os.path.lexists(target) and not _is_folder(target)]
    if there:
        sources = [clip.file for clip in clips] + ([] if list_name is None else [list_name])
        read = {_identity(name): name for name in sources if name != STDIN}
        read.pop(None, None)
        for target in there:
            if name := read.get(_identity(target)):
                raise _wrong(
                    f"--out must be a folder without the recordings, but {target} is {name} itself; name another"
                )
    return there


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  (`Path` raises for too long a name)


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Return what all names of one file share, None if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  (`Path` would normalise a name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _wrong(f"--out must be a folder, but {folder} cannot be one: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _wrong(f"--out must be a folder that can be written, but {folder} cannot; name another")


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message.translate(CONTROLS))  # names of files may have some
