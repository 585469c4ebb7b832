"""The command `carnelian-transcribe`: audio files in; text, JSON, subtitles or CTM out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, cast

import typer

from ._client import CarnelianClient
from ._errors import CarnelianClientError
from ._files_cli import STDIN, Clip, Existing, all_names, check_ctm, place
from ._formats import CONTROLS
from ._long import DEFAULT_LONGEST_S, check_longest_piece
from ._output_cli import (
    drop_unprinted,
    name_once,
    prepare_stdout,
    print_text,
    print_transcript,
    write_transcript,
)
from ._retry import DEFAULT_ATTEMPTS, RetryPolicy
from ._run_cli import Run, transcribe_each, transcribe_each_long
from ._settings import DEFAULT_CONCURRENCY, DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL, OWN_ADDRESS
from ._stream import DEFAULT_INTERIM_S, DEFAULT_PAUSE_S, check_interim, check_pause
from ._stream_cli import tell_stream
from ._types import TLS, DecodingOptions, Utterance

API_KEY_VARIABLE = "CARNELIAN_API_KEY"


class OutputFormat(Enum):
    """The formats in which a transcript can be printed."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"
    CTM = "ctm"


def _folder(path: str) -> Path:
    """Refuse an empty path, as an unset shell variable gives it: `Path` would take it for the working directory."""
    if not path:
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    return Path(path)


def _tell(message: str) -> None:
    if sys.stderr is not None:  # if it is closed, `print` would use the standard output
        try:
            print(f"carnelian-transcribe: {message}", file=sys.stderr)
        except OSError:  # the transcripts go on where the messages have no room
            drop_unprinted(sys.stderr)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"carnelian-client {version('carnelian-client')}")
        raise typer.Exit


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=f"An API key is read from the environment variable {API_KEY_VARIABLE}.")
def transcribe(
    context: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Audio files; - is the standard input.")
    ] = None,
    files_from: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Transcribe the files named here too, one a line or as find -print0 does; - is standard input.",
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="host:port of Triton's gRPC endpoint.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Name of the model.")] = DEFAULT_MODEL,
    formats: Annotated[
        list[OutputFormat] | None,
        typer.Option("--format", help="What to print; repeatable with --out.  [default: text]"),
    ] = None,
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
    root: Annotated[
        Path | None,
        typer.Option(parser=_folder, help="With --out, keep there the files' folders below this one."),
    ] = None,
    existing: Annotated[
        Existing,
        typer.Option(
            help="With --out, what to do if files to write exist: refuse to begin, skip what is done, or replace them."
        ),
    ] = "refuse",
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
        typer.Option(min=1, help="Tries within --timeout while the server is away or busy; 20 outlast 36 s."),
    ] = DEFAULT_ATTEMPTS,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt, trusting the usual authorities.")] = False,
    ca_path: Annotated[
        Path | None,
        typer.Option("--ca", help="Encrypt, trusting the authorities in this PEM file.", exists=True, dir_okay=False),
    ] = None,
    cert_path: Annotated[
        Path | None, typer.Option("--cert", help="PEM file of this client's certificate.", exists=True, dir_okay=False)
    ] = None,
    key_path: Annotated[
        Path | None, typer.Option("--key", help="PEM file of the certificate's key.", exists=True, dir_okay=False)
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Transcribe audio files with a Carnelian server.

    Prints the text; with several files or a list, the file's name, a tab and the text. --format prints JSON lines, SRT
    or WebVTT subtitles, or CTM instead. A file that fails is reported on the standard error and the others go on,
    unless they would fail for the same reason; the exit status is then 1. It is 2 for wrong use.
    """
    decoding = _options(options or [])
    chosen = [*(formats or []), *([OutputFormat.JSON] if as_json else [])]
    kinds = tuple(dict.fromkeys(each.value for each in chosen or [OutputFormat.TEXT]))
    names = all_names(files or [], files_from)
    _check(_given_options(context), names, kinds, decoding)
    if out is not None:
        clips, num_there = place(names, kinds, out, root, existing, files_from)
        deliver = functools.partial(write_transcript, may_replace=existing == "replace")
    else:
        clips, num_there = [Clip(name, {}) for name in names], 0
        deliver = functools.partial(print_transcript, kind=kinds[0], with_name=len(names) > 1 or files_from is not None)
        prepare_stdout(kinds[0])
    can_go_on = out is not None and existing != "replace"
    run = Run(clips, 1 if is_long else concurrency, num_there=num_there, can_go_on=can_go_on)
    try:
        check_longest_piece(longest_piece_s)
        check_pause(pause_s)
        check_interim(interim_s or None)
        is_encrypted = tls or ca_path or cert_path or key_path
        encryption = TLS(ca_path=ca_path, cert_path=cert_path, key_path=key_path) if is_encrypted else None
        client = _connect(url, model, timeout_s, attempts, encryption)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(_in_options(str(error), context)) from error
    has_failed = False
    try:
        with client:
            if is_stream:
                hear = functools.partial(
                    client.transcribe_stream,
                    interim_s=interim_s or None,
                    pause_s=pause_s,
                    longest_piece_s=longest_piece_s,
                    **decoding,
                )
                failures = _transcribe_stream(hear, names[0], kinds[0])
            elif is_long:
                outcomes = transcribe_each_long(client, run.files(), longest_piece_s, concurrency, decoding)
                failures = run.take(outcomes, deliver)
            else:
                failures = run.take(transcribe_each(client, run.files(), concurrency, decoding), deliver)
            for failure in failures:
                has_failed = True
                _tell(failure.translate(CONTROLS))
    except KeyboardInterrupt:
        if len(clips) > 1:
            _tell(run.describe_interruption())
        raise
    for message in run.sum_up():
        _tell(message)
    if has_failed:
        if out is None:
            drop_unprinted(sys.stdout)
        raise typer.Exit(1)


def _in_options(message: str, context: typer.Context) -> str:
    """Name options in a message of the SDK where it has its arguments, after which the parameters here are named."""
    options = {param.name: param.opts[0] for param in context.command.params} | {"api_key": API_KEY_VARIABLE}
    return re.sub(r"`(\w+)`", lambda argument: options.get(argument[1], argument[0]), message)


def _given_options(context: typer.Context) -> set[str]:
    sources = {param.opts[0]: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check(given: set[str], files: list[str], kinds: tuple[str, ...], decoding: DecodingOptions) -> None:
    """Refuse options that do not go together, and a standard output that is closed."""
    is_plain = set(kinds) <= {"text", "json"}
    if "--out" not in given:
        if given & {"--root", "--existing"}:
            raise typer.BadParameter("--root and --existing must come with --out: what is printed has no files")
        if len(kinds) > 1:
            raise typer.BadParameter(
                f"what is printed must have one format, but there are {' and '.join(kinds)}; drop the others, or use "
                "--out for a file of each"
            )
        if kinds[0] in ("srt", "vtt") and len(files) > 1:
            raise typer.BadParameter(
                f"--format {kinds[0]} must have one file, or --out for a file each; there are {len(files)}"
            )
        if kinds[0] == "ctm":
            check_ctm(files)
    if "--long" in given and "n_best" in decoding:
        raise typer.BadParameter("--long must come without the option n_best: alternatives belong to a piece of a file")
    if "--longest-piece" in given and not given & {"--long", "--stream"}:
        raise typer.BadParameter("--longest-piece must come with --long or --stream: other files are sent whole")
    if given & {"--pause", "--interim"} and "--stream" not in given:
        raise typer.BadParameter("--pause and --interim must come with --stream: other files have no utterances")
    if given >= {"--concurrency", "--stream"}:
        raise typer.BadParameter("--concurrency must come without --stream: one utterance is sent after the other")
    if "--stream" in given and (len(files) > 1 or given & {"--long", "--out", "--files-from"} or not is_plain):
        raise typer.BadParameter(
            "--stream must have one file, and must come without --long, --out, --files-from, and other formats than "
            "text and json"
        )
    if "--out" not in given and sys.stdout is None:
        raise typer.BadParameter("the standard output must be open, but it is closed; open it, or use --out")


def _connect(url: str, model: str, timeout_s: float, attempts: int, tls: TLS | None) -> CarnelianClient:
    """Return a client with the key of the environment; tell if others can read that."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would write its own lines beside our messages
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    retry = RetryPolicy(num_attempts=attempts)
    with _interrupted_later():
        client = CarnelianClient(url, model=model, timeout_s=timeout_s, retry=retry, tls=tls, api_key=api_key)
    if api_key and not (tls or OWN_ADDRESS.fullmatch(url)):
        _tell(f"{API_KEY_VARIABLE} is sent unencrypted; use --tls if others share the network")
    return client


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C back: while they are imported, NumPy and gRPC make an ImportError of it."""
    if not hasattr(signal, "pthread_sigmask"):  # as on Windows
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
                else:
                    print_text(told)
    except BrokenPipeError:  # nobody reads on
        raise
    except (CarnelianClientError, ModuleNotFoundError, OSError) as error:
        yield name_once(file, error)


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
