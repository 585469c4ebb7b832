"""How commands write what they measure, and show it; nothing heavy is imported before."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from carnelian_perf.raw_file import RawFile

Measured = TypeVar("Measured", bound="RawFile")


def write_each(measurements: Iterable[Measured], path: Path) -> None:
    """Write each measurement, marked as unfinished, so that a later failure loses nothing; then write the last one.

    If `path` is a finished raw file, it stays until then, and unfinished ones are written beside it.

    Raises:
        ValueError: There is no measurement.
    """
    written = None
    part = path.with_name(f"{path.stem}_unfinished.json") if _is_finished(path) else path
    try:
        for measurement in measurements:
            dataclasses.replace(measurement, finished=False).write(part)
            written = measurement
    except BaseException:  # also Ctrl-C
        if written is not None:
            command = f"carnelian-perf {written.subject} --render {shlex.quote(str(part))}"
            typer.echo(f"{part} has what was measured so far; its page: {command}", err=True)
        raise
    if written is None:
        raise ValueError(f"there must be something to measure for {path}, but there was nothing")
    written.write(path)
    if part != path:
        part.unlink()


def _is_finished(path: Path) -> bool:
    """Whether a file exists that is not marked as unfinished."""
    try:
        return path.is_file() and bool(json.loads(path.read_bytes()).get("finished", True))
    except (ValueError, AttributeError):  # no raw file
        return True


def show_page(
    raw_path: Path,
    kind: "type[Measured]",
    render_page: Callable[[Measured, str], str],
    draw: Callable[[Measured, Path], None] | None = None,
) -> Measured:
    """Write a raw file's page and, if there is a `draw`, its plot beside it; print the page.

    Returns:
        The measurement that the raw file holds.

    Raises:
        RawFileError: The file is not a raw file of this kind, or a page cannot be made of it.
    """
    from carnelian_perf.pages import rendering
    from carnelian_perf.whole_file import write_whole

    measurement = kind.read(raw_path)
    with rendering(raw_path):
        text = render_page(measurement.as_text(), raw_path.name)
    page = raw_path.with_suffix(".md")
    write_whole(page, text)
    typer.echo(f"{text}\nwrote {page}")
    if draw is not None:
        plot = raw_path.with_suffix(".png")
        draw(measurement, plot)
        typer.echo(f"wrote {plot}")
    return measurement
