"""Options of the commands: lists, words and files, checked before anything heavy is imported; and what they write."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from carnelian_perf.raw_file import RawFile

Measured = TypeVar("Measured", bound="RawFile")
DEMO_MANIFEST = Path("demo/clips/manifest.jsonl")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
MOST_TARGET_MS = 3_600_000  # an hour; without a limit, infinity would be a target
MOST_THREADS = 1024  # more than CPUs have; for a hundred thousand, libraries run out of memory and crash

Overrides = Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the file; repeatable.")]

Repository = Annotated[Path, typer.Option(help="The repository under test.")]
Recogniser = Annotated[str, typer.Option(help="The recogniser.")]
RandomWeights = Annotated[
    Path | None,
    typer.Option(help="A training YAML whose network is served with random weights, in place of --repository."),
]
Durations = Annotated[str, typer.Option(help="Lengths of clips in seconds, comma-separated.")]
FileFormat = Annotated[str, typer.Option("--format", help="Format of the files: flac or wav.")]
ClipsManifest = Annotated[
    Path | None,
    typer.Option(help="Manifest whose clips are sent whole.", show_default="the demo's, cut to log-normal durations"),
]
PublishedMachine = Annotated[
    str | None, typer.Option(help="Part of the published machine's name.", show_default="A100")
]
SpeechManifest = Annotated[Path, typer.Option(help="Manifest of the speech that is cut to the durations.")]


def raw_file_option(name: str, description: str) -> Any:
    """The option `--out` of a command whose raw file is `name` unless told otherwise."""
    return typer.Option(callback=check_raw_file, help=description, show_default=f"perf/results/{name}")


def render_option(pages: str) -> Any:
    """The option `--render` of a command that makes such pages of a raw file."""
    return typer.Option("--render", help=f"Measure nothing: make {pages} of this raw file.")


def counts_of(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them, each once."""
    from carnelian_perf.clips import MOST_CUTS

    counts = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= count <= MOST_CUTS for count in counts):
        raise typer.BadParameter(
            f"{option} must be whole numbers from 1 to {MOST_CUTS} with commas between them, but is {text!r}"
        )
    return list(dict.fromkeys(counts))


def numbers_of(option: str, text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} must be numbers with commas between them, but is {text!r}") from None


def durations_of(text: str) -> list[float]:
    """Seconds of clips to cut, with commas between them, of `--durations`; each once."""
    from carnelian_perf.clips import LIMIT_S, SHORTEST_CUT_S

    durations = numbers_of("--durations", text)
    if not all(SHORTEST_CUT_S <= duration <= LIMIT_S for duration in durations):
        raise typer.BadParameter(
            f"--durations must be seconds from {SHORTEST_CUT_S:g} to {LIMIT_S:g}, with commas between, but is {text!r}"
        )
    return list(dict.fromkeys(durations))


def published_table(model: str | None, machine: str | None, precision: str | None) -> dict[str, str]:
    """The published table that the options choose, as arguments of `choose`; empty without any of them."""
    if model is None:
        if machine or precision:
            raise typer.BadParameter(
                "--published-machine and --published-precision must come with --published-model, but there is none; "
                "name the model whose published table is set beside ours"
            )
        return {}
    return {"model": model, "hardware": machine or "A100", "precision": precision or "fp16"}


def folder(path: str) -> Path:
    """A folder to write. Not "", a variable of a shell that is not set: to Path it is the working directory."""
    if not path:
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    return Path(path)


def check_words(option: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Refuse words that are not known."""
    if wrong := set(words) - set(known):
        raise typer.BadParameter(f"{option} must be of {', '.join(known)}, but has {', '.join(sorted(wrong))}")


def check_file(option: str, path: Path) -> None:
    """Refuse what is no file."""
    if not path.is_file():
        raise typer.BadParameter(f"{option} must be a file, but {path} is not there")


def check_render(context: typer.Context, raw: Path, *read: str) -> None:
    """Refuse a raw file that is not there, and beside it what rendering would not read.

    Args:
        context: Of the command.
        raw: What `--render` names.
        read: Other options that rendering reads.
    """
    check_file("--render", raw)
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if others := given - {"--render", *read}:
        names = (name if name.startswith("--") else name.upper() for name in sorted(others))
        raise typer.BadParameter(f"--render, which measures nothing, must come without {', '.join(names)}")


def check_raw_file(path: Path | None) -> Path | None:
    """Refuse a name that a page or a plot, which are written beside the raw file, would overwrite; or nothing could."""
    if path is not None and path.suffix != ".json":
        raise typer.BadParameter(f"a raw file must end in .json, for pages and plots go beside it, but is {path}")
    return check_writable(path)


def raw_file_path(out: Path | None, name: str) -> Path:
    """`--out`, or its default, which must be writable as well."""
    path = out or Path("perf/results") / name
    check_raw_file(path)
    return path


def check_writable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, what could not be written afterwards."""
    if path is not None:
        there = next(place for place in (path, *path.resolve().parents) if place.exists())
        if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
            raise typer.BadParameter(f"this must be a file that can be written, but {there} is in the way of {path}")
    return path


def check_apart(target: Path | None, *sources: Path | None) -> None:
    """Refuse to write over a file what is measured with it; None stands for one that was not given."""
    for source in sources:
        if target is not None and source is not None and source.resolve() == target.resolve():
            raise typer.BadParameter(f"the target must be another file than {source}, which would be lost")


def check_model_and_clips(repository: Path, model: str, manifest: Path | None) -> None:
    """Refuse a recogniser or a manifest that is not there."""
    from carnelian_perf.repository import WrongModelError, check_model

    check_file("--manifest", manifest or DEMO_MANIFEST)
    try:
        check_model(repository, model)
    except WrongModelError as error:
        raise typer.BadParameter(str(error)) from error


def describe_clips(manifest: Path | None) -> str:
    """Where clips are from, in words."""
    return f"those of {manifest}" if manifest else f"{DEMO_MANIFEST}, joined and cut to log-normal durations"


def write_each(measurements: Iterable[Measured], path: Path) -> Measured:
    """Write each, so that it is not lost if a later part fails, as unfinished; then the last one.

    Where a finished raw file is there, it stays until then, and the unfinished ones go beside it.

    Returns:
        The last one.
    """
    part = path.with_name(f"{path.stem}_unfinished.json") if _is_finished(path) else path
    for measurement in measurements:
        dataclasses.replace(measurement, finished=False).write(part)
    measurement.write(path)
    if part != path:
        part.unlink()
    return measurement


def _is_finished(path: Path) -> bool:
    """Whether a file is there that is not known to be unfinished."""
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
    """Write, beside a raw file, the page that `render_page` makes of it and its name, and the plot that `draw` makes.

    The page is printed.

    Returns:
        What the raw file holds.

    Raises:
        RawFileError: It is none, or a page cannot be made of it.
    """
    from carnelian_perf.pages import rendering, write_page

    measurement = kind.read(raw_path)
    with rendering(raw_path):
        text = render_page(measurement.as_text(), raw_path.name)
    typer.echo(f"{text}\nwrote {write_page(raw_path, text)}")
    if draw is not None:
        plot = raw_path.with_suffix(".png")
        draw(measurement, plot)
        typer.echo(f"wrote {plot}")
    return measurement


@contextlib.contextmanager
def served_repository(
    repository: Path, model: str, random_weights: Path | None, manifest: Path | None
) -> Iterator[tuple[Path, str]]:
    """The repository and the recogniser under test: those given, or an export of a network that nobody has trained.

    What is not there is refused first, as is a manifest: an export takes minutes.
    """
    if random_weights is None:
        check_model_and_clips(repository, model, manifest)
        yield repository, model
        return
    check_file("--random-weights", random_weights)
    check_file("--manifest", manifest or DEMO_MANIFEST)
    from carnelian_perf.networks import export_random

    with tempfile.TemporaryDirectory(prefix="carnelian-perf-") as scratch:
        exported, name = Path(scratch) / "models", random_weights.stem
        export_random({name: random_weights}, exported)
        yield exported, name
