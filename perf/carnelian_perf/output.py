"""How commands write what they measure, and show it; nothing heavy is imported before."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from carnelian_perf.options import choose_published

if TYPE_CHECKING:
    from carnelian_perf.raw_file import RawFile

Measured = TypeVar("Measured", bound="RawFile")
RESULTS = {
    "batching": "traffic.batching_results",
    "mixed": "traffic.mixed_results",
    "infer": "inference.results",
    "tune": "server.tune_results",
    "overhead": "server.overhead_results",
    "first-request": "server.first_request_results",
    "memory": "server.memory_results",
    "training": "training.steps_results",
    "hourglass": "training.hourglass_results",
}
"""Command with a page -> the module with its `Measurement` and `render_page` and, if it has a plot, `draw`."""


def write_each(measurements: Iterable[Measured], path: Path) -> Measured:
    """Write each measurement, marked as unfinished, so that a later failure loses nothing; then write the last one.

    If `path` is a finished raw file, it stays until then, and unfinished ones are written beside it.

    Returns:
        The last measurement.

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
            command = f"carnelian-perf report {shlex.quote(str(part))}"
            typer.echo(f"{part} has what was measured so far; its page: {command}", err=True)
        raise
    if written is None:
        raise ValueError(f"there must be something to measure for {path}, but there was nothing")
    written.write(path)
    if part != path:
        part.unlink()
    return written


def record(measurements: Iterable[Measured], path: Path) -> Measured:
    """Write each measurement as :func:`write_each` does, then the page of the last one, which is returned."""
    measured = write_each(measurements, path)
    show_page(path)
    return measured


def _is_finished(path: Path) -> bool:
    """Whether a file exists that is not marked as unfinished."""
    try:
        return path.is_file() and bool(json.loads(path.read_bytes()).get("finished", True))
    except (ValueError, AttributeError):  # no raw file
        return True


def show_page(raw_path: Path, published: Mapping[str, str] | None = None) -> None:
    """Write a raw file's page and, if its command has one, the plot beside it; print the page.

    Args:
        raw_path: The raw file.
        published: For `infer`, names another published table than the file does, as its field `published` does.

    Raises:
        RawFileError: The file is not a raw file of a command with a page, or a page cannot be made of it.
        typer.BadParameter: There is no such published table.
    """
    from carnelian_perf.pages import rendering
    from carnelian_perf.raw_file import RawFileError, command_line, read_subject
    from carnelian_perf.whole_file import write_whole

    subject = read_subject(raw_path)
    if subject not in RESULTS:
        raise RawFileError(
            f"{raw_path} must be a raw file of {', '.join(RESULTS)}, of which a page can be made, but its `subject` is "
            f"{subject!r}; of a sweep, name the folder"
        )
    results = import_module(f"carnelian_perf.{RESULTS[subject]}")
    measurement = results.Measurement.read(raw_path)
    if published:
        if subject != "infer":
            raise RawFileError(
                f"a raw file must be of infer, or of a sweep, for a published table beside it, but {raw_path} is of "
                f"{subject}; leave --published-model out"
            )
        choose_published(published)  # or the raw file would be to blame
        measurement = dataclasses.replace(measurement, published=published)
    with rendering(raw_path):
        text = results.render_page(measurement.as_text(), raw_path.name)
    if published:
        text += f"- This page: `{command_line()}`.\n"
    page = raw_path.with_suffix(".md")
    write_whole(page, text)
    typer.echo(f"{text}\nwrote {page}")
    if hasattr(results, "draw"):
        plot = raw_path.with_suffix(".png")
        results.draw(measurement, plot)
        typer.echo(f"wrote {plot}")
