"""Options that commands share; checked before anything heavy is imported."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from carnelian_perf.whole_file import is_stream

if TYPE_CHECKING:
    from carnelian_perf.yardsticks.published import Published

DEMO_MANIFEST = Path("demo/clips/manifest.jsonl")
DEMO_CHECKPOINT = Path("demo/quartznet_demo.pt")
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
MOST_TARGET_MS = 3_600_000  # one hour; the limit also refuses infinity
MOST_THREADS = 1024  # more than CPUs have; with a hundred thousand, libraries run out of memory and crash


def check_file(option: str, path: Path) -> None:
    """Refuse the path of an option unless it is a file that exists, and no pipe: some files are read twice."""
    if not path.is_file():
        found = "a folder, a pipe or a device" if path.exists() else "not there"
        if path in (DEMO_MANIFEST, DEMO_CHECKPOINT):
            found += " (the default, found from the root of the repository)"
        raise typer.BadParameter(f"{option} must be a file, but {path} is {found}; name a file on disk")


def check_input(path: Path | None) -> Path | None:
    """Refuse what is no file on disk; the callback of an option or argument that may be left out."""
    if path is not None:
        check_file("this", path)
    return path


def check_checkpoint(path: Path) -> Path:
    """Refuse what is neither a file on disk nor a folder, as Hugging Face's models are; the callback of an argument."""
    if not (path.is_dir() or path.is_file()):
        raise typer.BadParameter(f"this must be a file or a folder on disk, but {path} is neither; name another")
    return path


Overrides = Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the file; repeatable.")]

Repository = Annotated[Path, typer.Option(help="The repository under test.")]
Recogniser = Annotated[str, typer.Option(help="The recogniser.")]
RandomWeights = Annotated[
    Path | None,
    typer.Option(
        help="A training YAML whose network is served with random weights, in place of a trained one.",
        callback=check_input,
    ),
]
Durations = Annotated[str, typer.Option(help="Lengths of clips in seconds, comma-separated.")]
FileFormat = Annotated[Literal["flac", "wav"], typer.Option("--format", help="Format of the files.")]
ClipsManifest = Annotated[
    Path | None,
    typer.Option(help="Manifest whose clips are sent whole.", show_default="the demo's, cut to log-normal durations"),
]
PublishedModel = Annotated[
    str | None,
    typer.Option(
        "--published-model",
        help="Whose published table is set beside ours: quartznet_15x5, jasper_10x5dr, wav2vec2_base_hourglass.",
    ),
]
PublishedPrecision = Annotated[
    str | None,
    typer.Option(help="fp16, tf32 or fp32; of wav2vec 2.0 you must name bf16 or tf32.", show_default="fp16"),
]
PublishedMachine = Annotated[
    str | None, typer.Option(help="Part of the published machine's name.", show_default="A100")
]
SpeechManifest = Annotated[Path, typer.Option(help="Manifest of the speech that is cut to the durations.")]


def raw_file_option(name: str, description: str) -> Any:
    """Make the option `--out` of a command whose raw file is called `name` by default."""
    return typer.Option(callback=check_raw_file, help=description, show_default=f"perf/results/{name}")


def counts_of(option: str, text: str) -> list[int]:
    """Parse whole numbers with commas between them; drop repeated ones."""
    from carnelian_perf.clips import MOST_CUTS

    counts = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= count <= MOST_CUTS for count in counts):
        raise typer.BadParameter(
            f"{option} must be whole numbers from 1 to {MOST_CUTS} with commas between them, but is {text!r}"
        )
    return list(dict.fromkeys(counts))


def numbers_of(option: str, text: str) -> list[float]:
    """Parse numbers with commas between them."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} must be numbers with commas between them, but is {text!r}") from None


def durations_of(text: str) -> list[float]:
    """Parse `--durations`: lengths of clips in seconds, with commas between them; drop repeated ones."""
    from carnelian_perf.clips import LIMIT_S, SHORTEST_CUT_S

    durations = numbers_of("--durations", text)
    if not all(SHORTEST_CUT_S <= duration <= LIMIT_S for duration in durations):
        raise typer.BadParameter(
            f"--durations must be seconds from {SHORTEST_CUT_S:g} to {LIMIT_S:g}, with commas between, but is {text!r}"
        )
    return list(dict.fromkeys(durations))


def published_table(model: str | None, machine: str | None, precision: str | None) -> dict[str, str]:
    """Return the arguments of `yardsticks.published.choose` for the table that the options name; empty without them."""
    if model is None:
        if machine or precision:
            raise typer.BadParameter(
                "--published-machine and --published-precision must come with --published-model, but there is none; "
                "name the model whose published table is set beside ours"
            )
        return {}
    return {"model": model, "hardware": machine or "A100", "precision": precision or "fp16"}


def choose_published(chosen: Mapping[str, str]) -> "Published":
    """Choose the table that the arguments of :func:`published_table` name; empty without them."""
    from carnelian_perf.yardsticks.published import choose

    try:
        return choose(**chosen) if chosen else {}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--published-model'") from error


def folder(path: str) -> Path:
    """Parse a folder to write. Refuse "", as an unset shell variable gives: Path takes it for the working directory."""
    if not path:
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    return Path(path)


def check_words(option: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Refuse words of an option that are not among the `known` ones."""
    if wrong := set(words) - set(known):
        raise typer.BadParameter(f"{option} must be of {', '.join(known)}, but has {', '.join(sorted(wrong))}")


def check_raw_file(path: Path | None) -> Path | None:
    """Refuse a raw file that cannot be written, or that does not end in .json: its page or plot could overwrite it."""
    if path is not None and path.suffix != ".json":
        raise typer.BadParameter(f"a raw file must end in .json, for pages and plots go beside it, but is {path}")
    return check_writable(path)


def raw_file_path(out: Path | None, name: str) -> Path:
    """Return the path of the raw file: `--out`, which its option has checked, or by default `name` in perf/results."""
    return out or default_target("--out", Path("perf/results") / name)


def default_target(option: str, path: Path) -> Path:
    """Return the file that is written unless an option names another; if it cannot be written, name that option."""
    try:
        check_writable(path)
    except typer.BadParameter as error:
        error.param_hint = f"'{option}'"
        raise
    return path


def check_writable(path: Path | None) -> Path | None:
    """Refuse, before anything is measured, a file that could not be written afterwards; None is accepted."""
    if path is not None:
        # A new file replaces the old one, so its folder must be writable as well.
        needed = [] if is_stream(path) else [next(place for place in path.resolve().parents if place.exists())]
        for there in [*needed, path] if path.exists() else needed:
            if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
                found = f"the {'folder' if there.is_dir() else 'file'} {there} is in the way of {path}"
                raise typer.BadParameter(f"this must be a file that can be written, but {found}; name another")
    return path


def check_apart(target: Path | None, *sources: Path | None) -> None:
    """Refuse a target that would overwrite one of the files that are read; None stands for a file that is not given."""
    for source in sources:
        if target is not None and source is not None and source.resolve() == target.resolve():
            raise typer.BadParameter(f"the target must be another file than {source}, which would be lost")
