"""The command `carnelian-serve`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import typer

from carnelian_serving.endings import KILLED, describe_exit
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import LogLevel, Server
from carnelian_serving.triton_options import StrayWordError, has_port

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
PAUSE_SIGNALS = (signal.SIGSEGV, signal.SIGABRT)
"""The signals by which tritonserver ends after it stood still, or its clock was set forward, amid requests."""
PRINT_S = 2.0
"""How long to wait for whoever reads what is printed. The server must be watched, and the command end, without them."""


def _folder(path: str) -> Path:
    """Refuse "", which an unset variable of a shell gives: Path takes it for the working directory."""
    if not path:
        raise typer.BadParameter("this must be a folder, but is empty; the working directory is .")
    return Path(path)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"carnelian-serving {version('carnelian-serving')}")
        raise typer.Exit


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    triton_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- TRITON_OPTION", help="Options that are passed on to tritonserver.", show_default=False
        ),
    ] = None,
    repository: Annotated[Path, typer.Option(parser=_folder, help="Folder of Triton models.")] = Path(
        "model_repository"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Load only this model and, of an ensemble, its stages. Repeatable."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 for every interface. Where other machines may reach it, Triton's "
            "shared memory is closed to clients, unless an option after -- gives it a key."
        ),
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes any free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port, which the client SDK uses.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of the Prometheus metrics.", min=0, max=65535)] = 8002,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of each ONNX Runtime and DALI instance.", min=1, show_default="the configs'"),
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds that loading the models may take.", min=1)] = 180,
    exit_timeout: Annotated[
        int, typer.Option(help="Seconds that what the models are at may take when the server stops.", min=1)
    ] = 30,
    log_level: Annotated[LogLevel, typer.Option(help="How much of Triton's log to show.")] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve a model repository with Triton Inference Server until SIGTERM or Ctrl-C.

    Uses the Triton of the container where there is one, else the one in the wheel nvidia-pytriton.
    """
    sleep = _hear_signals()
    try:
        server = Server(
            repository,
            models=model or (),
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            threads=threads,
            log_level=log_level,
            ready_timeout_s=start_timeout,
            exit_timeout_s=exit_timeout,
            triton_options=triton_options or (),
            on_log=partial(_write, sys.stderr),
            sleep=sleep,
        )
        _print(sys.stderr, f"carnelian-serve: starting tritonserver on {server.repository}")
        with server:
            _print_ready(server, triton_options or ())
            status = server.wait()
    except _Stop:
        return
    except StrayWordError as error:
        raise typer.BadParameter(str(error)) from None
    except (ServerError, OSError) as error:
        _print(sys.stderr, f"carnelian-serve: {error}")
        raise typer.Exit(1) from None
    pause = ""
    if -status in PAUSE_SIGNALS:
        pause = "a pause of the machine, or a step of its clock, of a second, under load, can do that; "
    why = f"; {KILLED}" if status == -signal.SIGKILL else f" by itself; {pause}its log above may say why"
    _print(
        sys.stderr,
        f"carnelian-serve: tritonserver must run until it is told to end, but {describe_exit(status)}{why}; start "
        "carnelian-serve anew",
    )
    raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    app()


class _Stop(BaseException):
    """A signal has asked the command to end."""


def _hear_signals() -> Callable[[float], None]:
    """Let :data:`STOP_SIGNALS` interrupt nothing from now on, and return a `time.sleep` that raises `_Stop` for them.

    What a handler raised would come at any place: Python drops it in a destructor, and a lock of `threading` that it
    meets makes another error of it.
    """
    heard = os.eventfd(0)
    poll = select.poll()  # `select.select` takes no number above 1023, which a caller's open files may leave
    poll.register(heard, select.POLLIN)

    def hear(number: int, frame: FrameType | None) -> None:
        os.eventfd_write(heard, 1)

    def sleep(seconds: float) -> None:
        if poll.poll(1000 * seconds):
            _print(sys.stderr, "carnelian-serve: stopping")
            raise _Stop

    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        signal.signal(number, hear)
    # Both are inherited. Where SIGCHLD is ignored, the kernel removes crashed stubs before anybody sees them.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    return sleep


def _print_ready(server: Server, triton_options: Sequence[str]) -> None:
    urls = {
        "grpc": f"gRPC {server.grpc_url}",
        "http": f"HTTP {server.http_url}",
        "metrics": f"metrics {server.metrics_url}",
    }
    opened = ", ".join(url for kind, url in urls.items() if has_port(kind, triton_options))
    _print(sys.stdout, f"carnelian-serve: ready; {opened}")


def _print(stream: TextIO | None, line: str) -> None:
    """Print a line, but go on after :data:`PRINT_S`; if somebody reads on later, they get it then."""
    writer = threading.Thread(target=_write, args=(stream, line), daemon=True)
    try:
        writer.start()
    except RuntimeError:  # no thread can be had
        _write(stream, line)
    else:
        writer.join(PRINT_S)


def _write(stream: TextIO | None, line: str) -> None:
    # A closed stream must not stop the server. Nor must one that nobody reads keep the command from ending: a thread
    # that waits in `print` would hold a lock that the interpreter needs at its end.
    if stream is None:  # it was closed from the start, and another file may have its number
        return
    with contextlib.suppress(OSError):
        os.write(stream.fileno(), f"{line}\n".encode(stream.encoding, "backslashreplace"))
