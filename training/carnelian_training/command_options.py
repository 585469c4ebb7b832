"""Checks of options of several commands, made before any work."""

import os
from pathlib import Path

import typer


def check_writable(path: Path | None) -> Path | None:
    """Check before the work that `path`, unless None, can be written afterwards; return it.

    Raises:
        typer.BadParameter: The path is a folder, or its folder cannot be created or written to.
    """
    if path is not None:
        there = next(place for place in (path, *path.resolve().parents) if place.exists())
        if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
            raise typer.BadParameter(f"this must be a file that can be written, but {there} is in the way of {path}")
    return path


def check_checkpoint(path: Path) -> Path:
    """Check that a checkpoint to write ends in .pt, so that no manifest is overwritten by mistake; return the path."""
    if path.suffix != ".pt":
        raise typer.BadParameter(f"a checkpoint must end in .pt, but the target is {path}")
    return path


def folder(path: str | Path) -> Path:
    """Check the path of a folder to write to, and return it as a `Path`.

    The empty string, for example from an unset shell variable, is refused: to `Path` it is the working directory.

    Raises:
        typer.BadParameter: The path is empty, or a file.
    """
    if not str(path):
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    if Path(path).is_file():
        raise typer.BadParameter(f"this must be a folder, but {path} is a file")
    return Path(path)
