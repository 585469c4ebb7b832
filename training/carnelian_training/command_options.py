"""What several commands need: checks of options, made before any work, and an output that takes any text."""

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from carnelian_training.replacement import is_stream

Overrides = Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the file; repeatable.")]


def version_option(distribution: str) -> Any:
    """Declare `--version`, which prints a distribution's version and ends the command, whatever else it lacks."""

    def show(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            typer.echo(f"{distribution} {version(distribution)}")
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Print the version and exit.")


def given_options(context: typer.Context) -> set[str]:
    """Return which options the command line names, as against those that have their defaults."""
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {
        option
        for option, source in sources.items()
        if option.startswith("--") and source is not None and source.name == "COMMANDLINE"
    }


def check_writable(path: Path | None) -> Path | None:
    """Check before the work that `path`, unless None, can be written afterwards; return it.

    Raises:
        typer.BadParameter: The path is a folder, or its folder cannot be created or written to.
    """
    if path is not None:
        # A new file replaces the old one, so its folder must be writable as well.
        needed = [] if is_stream(path) else [next(place for place in path.resolve().parents if place.exists())]
        for there in [*needed, path] if path.exists() else needed:
            if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
                found = f"the {'folder' if there.is_dir() else 'file'} {there} is in the way of {path}"
                raise typer.BadParameter(f"this must be a file that can be written, but {found}; name another")
    return path


def check_pt_target(path: Path) -> Path:
    """Check that a checkpoint can be written and ends in .pt, so that no manifest is overwritten by mistake."""
    return _check_ending(path, ".pt", "a checkpoint")


def check_nemo_target(path: Path) -> Path:
    """Check that a .nemo file can be written and ends in .nemo, so that no other file is overwritten by mistake."""
    return _check_ending(path, ".nemo", "a file of NeMo's")


def _check_ending(path: Path, suffix: str, kind: str) -> Path:
    if path.suffix != suffix:
        raise typer.BadParameter(f"{kind} must end in {suffix}, but the target is {path}")
    check_writable(path)
    return path


def folder(path: str | Path) -> Path:
    """Check the path of a folder to write to, and return it as a `Path`.

    The empty string, for example from an unset shell variable, is refused: to `Path` it is the working directory.

    Raises:
        typer.BadParameter: The path is empty, or a file or a device.
    """
    if not str(path):
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112  (no name breaks them)
        raise typer.BadParameter(f"this must be a folder, but {path} is a file")
    return Path(path)


def escape_output() -> None:
    """Escape characters that standard output cannot encode (a terminal in Latin-1), so that they end no command.

    By default Python does this for standard error alone.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
