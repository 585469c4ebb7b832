"""The command `carnelian-transcribe`: audio files in, one line of text or JSON for each out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._settings import DEFAULT_CONCURRENCY, DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._types import TLS, Audio

STDIN = "-"
API_KEY_VARIABLE = "CARNELIAN_API_KEY"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=f"An API key is read from the environment variable {API_KEY_VARIABLE}.")
def transcribe(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Audio files; - is the standard input.")],
    url: Annotated[str, typer.Option(help="host:port of Triton's gRPC endpoint.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Name of the model.")] = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for one file.")] = DEFAULT_TIMEOUT_S,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = DEFAULT_CONCURRENCY,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt, trusting the usual authorities.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Encrypt, trusting the authorities in this PEM file.")] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file of this client's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
) -> None:
    """Transcribe audio files with a Carnelian server.

    Prints the text; with several files, the file's name, a tab and the text. A file that fails is reported on
    the standard error, the others go on, and the exit status is 1; it is 2 for wrong use.
    """
    from ._client import CarnelianClient
    from ._types import Transcript

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would write its own lines beside our messages
    try:
        client = CarnelianClient(
            url,
            model=model,
            timeout_s=timeout_s,
            tls=_tls(tls, ca, cert, key),
            api_key=os.environ.get(API_KEY_VARIABLE),
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error

    num_failed = 0
    with client:
        outcomes = client.transcribe_many(_read(files), concurrency=concurrency)
        for file, outcome in zip(files, outcomes, strict=True):
            if not isinstance(outcome, Transcript):
                num_failed += 1
                print(f"carnelian-transcribe: {_name_once(file, outcome)}", file=sys.stderr)
            elif as_json:
                print(json.dumps({"file": file, "request_id": outcome.request_id, **outcome.raw}), flush=True)
            else:
                print(outcome.text if len(files) == 1 else f"{file}\t{outcome.text}", flush=True)
    if num_failed:
        raise typer.Exit(1)


def _tls(tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> TLS | None:
    from ._types import TLS

    return TLS(ca_path=ca, cert_path=cert, key_path=key) if tls or ca or cert or key else None


def _read(files: list[str]) -> Iterator[Audio]:
    for file in files:
        yield sys.stdin.buffer.read() if file == STDIN else file


def _name_once(file: str, error: Exception) -> str:
    """Errors of the SDK name a path already; the standard input and the system's own words need it."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return text if text.startswith(f"{file}: ") else f"{file}: {text}"
