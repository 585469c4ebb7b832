"""Options of several commands: what they refuse before any work."""

import os
from pathlib import Path

import typer


def check_writable(path: Path | None) -> Path | None:
    """Refuse, before hours of work, what could not be written afterwards."""
    if path is not None:
        there = next(place for place in (path, *path.resolve().parents) if place.exists())
        if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
            raise typer.BadParameter(f"this must be a file that can be written, but {there} is in the way of {path}")
    return path


def check_checkpoint(path: Path) -> Path:
    """A checkpoint to write, which no manifest ends like."""
    if path.suffix != ".pt":
        raise typer.BadParameter(f"a checkpoint must end in .pt, but the target is {path}")
    return path


def folder(path: str | Path) -> Path:
    """A folder to write. Not "", a variable of a shell that is not set: to Path it is the working directory.

    Raises:
        typer.BadParameter: It is empty, or a file.
    """
    if not str(path):
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    if Path(path).is_file():
        raise typer.BadParameter(f"this must be a folder, but {path} is a file")
    return Path(path)
