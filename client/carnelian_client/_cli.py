"""The command `carnelian-transcribe`: audio files in; text, JSON, subtitles or CTM out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast

import typer

from ._audio import read_all
from ._client import CarnelianClient, Outcome
from ._errors import CarnelianClientError
from ._formats import CONTROLS, ctm_name
from ._long import DEFAULT_LONGEST_S, check_longest_piece
from ._output_cli import deliver_all, drop_unprinted, name_once, prepare_stdout, print_text
from ._retry import DEFAULT_ATTEMPTS, RetryPolicy
from ._settings import DEFAULT_CONCURRENCY, DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL, OWN_ADDRESS
from ._stream import DEFAULT_INTERIM_S, DEFAULT_PAUSE_S, check_interim, check_pause
from ._stream_cli import tell_stream
from ._types import TLS, Audio, DecodingOptions, Utterance

STDIN = "-"
SUFFIXES = {"text": "txt"}
API_KEY_VARIABLE = "CARNELIAN_API_KEY"

OutputFormat: TypeAlias = Literal["text", "json", "srt", "vtt", "ctm"]
"""The formats in which a transcript can be printed."""


def _folder(path: str) -> Path:
    """Refuse an empty path, as an unset shell variable gives it: `Path` would take it for the working directory."""
    if not path:
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    return Path(path)


def _tell(message: str) -> None:
    if sys.stderr is not None:  # if it is closed, `print` would use the standard output
        print(f"carnelian-transcribe: {message}", file=sys.stderr)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"carnelian-client {version('carnelian-client')}")
        raise typer.Exit


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=f"An API key is read from the environment variable {API_KEY_VARIABLE}.")
def transcribe(
    context: typer.Context,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Audio files; - is the standard input.")],
    url: Annotated[str, typer.Option(help="host:port of Triton's gRPC endpoint.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Name of the model.")] = DEFAULT_MODEL,
    output: Annotated[OutputFormat, typer.Option("--format", help="What to print.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json: one object a line.")] = False,
    is_long: Annotated[
        bool, typer.Option("--long", help="Files of any length: cut in their pauses, one file after the other.")
    ] = False,
    is_stream: Annotated[
        bool,
        typer.Option("--stream", help="Audio that still arrives, through a pipe: print each utterance when it ends."),
    ] = False,
    longest_piece_s: Annotated[
        float,
        typer.Option("--longest-piece", help="With --long or --stream, seconds of the longest piece, 5 to 60."),
    ] = DEFAULT_LONGEST_S,
    pause_s: Annotated[
        float, typer.Option("--pause", help="With --stream, seconds of silence that end an utterance, 0.1 to 5.")
    ] = DEFAULT_PAUSE_S,
    interim_s: Annotated[
        float,
        typer.Option(
            "--interim",
            help="With --stream, seconds between interim results, which a terminal and JSON show; 0 for none.",
        ),
    ] = DEFAULT_INTERIM_S,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=_folder, help="Write each file's transcript into this folder instead, as NAME.txt, .json, ..."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", help="Option of the decoder, such as decoder=ngram or hotwords='[\"ada\"]'; repeatable."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds for one file; with --long or --stream, for a piece of it.")
    ] = DEFAULT_TIMEOUT_S,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at a time.")] = DEFAULT_CONCURRENCY,
    attempts: Annotated[
        int,
        typer.Option(min=1, help="Tries while the server is away or busy; 5 outlast 1.5 s, 20 outlast 38 s."),
    ] = DEFAULT_ATTEMPTS,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt, trusting the usual authorities.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option(help="Encrypt, trusting the authorities in this PEM file.", exists=True, dir_okay=False),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(help="PEM file of this client's certificate.", exists=True, dir_okay=False)
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="PEM file of the certificate's key.", exists=True, dir_okay=False)
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Transcribe audio files with a Carnelian server.

    Prints the text; with several files, the file's name, a tab and the text. --format prints JSON lines, SRT or WebVTT
    subtitles, or CTM instead. A file that fails is reported on the standard error and the others go on; the exit status
    is then 1. It is 2 for wrong use.
    """
    decoding = _options(options or [])
    _check(_given_options(context), files, output, decoding)
    kind = "json" if as_json else output
    targets = _targets(files, out, kind)
    prepare_stdout(kind)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would write its own lines beside our messages
    try:
        check_longest_piece(longest_piece_s)
        check_pause(pause_s)
        check_interim(interim_s or None)
        encryption = TLS(ca_path=ca, cert_path=cert, key_path=key) if tls or ca or cert or key else None
        client = _connect(url, model, timeout_s, attempts, encryption)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    with client:
        if is_stream:
            hear = functools.partial(
                client.transcribe_stream,
                interim_s=interim_s or None,
                pause_s=pause_s,
                longest_piece_s=longest_piece_s,
                **decoding,
            )
            failures = _transcribe_stream(hear, files[0], kind)
        else:
            if is_long:
                outcomes = _transcribe_long(client, files, longest_piece_s, concurrency, decoding)
            else:
                outcomes = _transcribe_many(client, files, concurrency, decoding)
            failures = deliver_all(outcomes, kind, files, targets)
        has_failed = False
        for failure in failures:
            has_failed = True
            _tell(failure.translate(CONTROLS))
    if has_failed:
        if out is None:
            drop_unprinted()
        raise typer.Exit(1)


def _given_options(context: typer.Context) -> set[str]:
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check(given: set[str], files: list[str], output: OutputFormat, decoding: DecodingOptions) -> None:
    """Refuse options that do not go together, and streams that are closed."""
    is_plain = output in ("text", "json")
    if "--json" in given and not is_plain:
        raise typer.BadParameter(f"--json must come without another --format, but that is {output}; drop one")
    if output in ("srt", "vtt") and len(files) > 1 and "--out" not in given:
        raise typer.BadParameter(
            f"--format {output} must have one file, or --out for a file each; there are {len(files)}"
        )
    if "--long" in given and "n_best" in decoding:
        raise typer.BadParameter("--long must come without the option n_best: alternatives belong to a piece of a file")
    if "--longest-piece" in given and not given & {"--long", "--stream"}:
        raise typer.BadParameter("--longest-piece must come with --long or --stream: other files are sent whole")
    if given & {"--pause", "--interim"} and "--stream" not in given:
        raise typer.BadParameter("--pause and --interim must come with --stream: other files have no utterances")
    if given >= {"--concurrency", "--stream"}:
        raise typer.BadParameter("--concurrency must come without --stream: one utterance is sent after the other")
    if "--stream" in given and (len(files) > 1 or given & {"--long", "--out"} or not is_plain):
        raise typer.BadParameter(
            "--stream must have one file, and must come without --long, --out, and other formats than text and json"
        )
    if STDIN in files and sys.stdin is None:
        raise typer.BadParameter("- must be the standard input, but it is closed")
    if "--out" not in given and sys.stdout is None:
        raise typer.BadParameter("the standard output must be open, but it is closed; open it, or use --out")


def _connect(url: str, model: str, timeout_s: float, attempts: int, tls: TLS | None) -> CarnelianClient:
    """Return a client with the key of the environment; tell if others can read that."""
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    retry = RetryPolicy(num_attempts=attempts)
    client = CarnelianClient(url, model=model, timeout_s=timeout_s, retry=retry, tls=tls, api_key=api_key)
    if api_key and not (tls or OWN_ADDRESS.fullmatch(url)):
        _tell(f"{API_KEY_VARIABLE} is sent unencrypted; use --tls if others share the network")
    return client


def _transcribe_many(
    client: CarnelianClient, files: list[str], concurrency: int, options: DecodingOptions
) -> Generator[Outcome, None, None]:
    left = iter(files)
    while True:
        try:
            yield from client.transcribe_many(map(_audio, left), concurrency=concurrency, **options)
            return
        except _StandardInputError as error:  # after the outcomes of the files before it
            yield error


def _transcribe_long(
    client: CarnelianClient, files: list[str], longest_piece_s: float, concurrency: int, options: DecodingOptions
) -> Generator[Outcome, None, None]:
    for file in files:
        try:
            yield client.transcribe_long(
                _audio(file), longest_piece_s=longest_piece_s, concurrency=concurrency, **options
            )
        except (CarnelianClientError, OSError) as error:
            yield error


def _transcribe_stream(
    hear: Callable[..., Iterator[Utterance | CarnelianClientError]], file: str, kind: str
) -> Iterator[str]:
    try:
        with (
            contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else open(file, "rb") as source,  # noqa: PTH123
            contextlib.closing(tell_stream(hear, source, kind)) as lines,
        ):
            for told in lines:
                if isinstance(told, CarnelianClientError):
                    yield name_once(file, told)
                elif failure := print_text(told, file):
                    yield failure
                    return
    except BrokenPipeError:  # nobody reads on
        raise
    except (CarnelianClientError, ModuleNotFoundError, OSError) as error:
        yield name_once(file, error)


def _targets(files: list[str], out: Path | None, kind: str) -> list[Path] | list[None]:
    """Return the file to write for each clip, None for the standard output; make the folder `out`."""
    if out is None:
        if kind == "ctm" and len(set(map(ctm_name, files))) < len(files):
            raise typer.BadParameter("--format ctm must have files of different names, which are its first column")
        return [None] * len(files)
    stems = ["stdin" if file == STDIN else Path(file).stem for file in files]
    targets = [out / f"{stem}.{SUFFIXES.get(kind, kind)}" for stem in stems]
    first: dict[Path, str] = {}
    for file, target in zip(files, targets, strict=True):
        if first.setdefault(target, file) != file:
            raise typer.BadParameter(
                f"--out must have files of different names, but {first[target]} and {file} would both be {target}"
            )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out must be a folder, but {out} cannot be one: {error.strerror}") from error
    return targets


def _options(assignments: list[str]) -> DecodingOptions:
    """Parse `name=value` assignments as decoding options; the server checks names and values."""
    methods = (
        CarnelianClient.transcribe,
        CarnelianClient.transcribe_many,
        CarnelianClient.transcribe_long,
        CarnelianClient.transcribe_stream,
    )
    taken = {name for method in methods for name in inspect.signature(method).parameters} - {"options"}
    chosen: dict[str, str] = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise typer.BadParameter(f"--option must be name=value, but is {assignment!r}")
        if name in taken:
            raise typer.BadParameter(
                f"--option must be one of the decoder, but {name} is not; the command has --model, --timeout, "
                "--concurrency, --longest-piece, --pause and --interim"
            )
        if name in chosen:
            raise typer.BadParameter(f"--option must name {name} once, but gives it as {chosen[name]!r} and {value!r}")
        chosen[name] = value
    return cast("DecodingOptions", chosen)


class _StandardInputError(OSError):
    """The standard input cannot be read."""


def _audio(file: str) -> Audio:
    try:
        return read_all(sys.stdin.buffer) if file == STDIN else file
    except OSError as error:  # as of a terminal that is gone
        raise _StandardInputError(error.errno, f"the standard input cannot be read: {error.strerror}") from error
