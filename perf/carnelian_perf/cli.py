"""The command line of `carnelian-perf`: it joins the commands of all subpackages."""

import io
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from carnelian_perf.accuracy import cli as accuracy
from carnelian_perf.inference import cli as inference
from carnelian_perf.server import cli as server
from carnelian_perf.sweeps import cli as sweeps
from carnelian_perf.traffic import cli as traffic
from carnelian_perf.training import cli as training

EXTRAS = {
    "sweep": ("sweep", "report"),
    "memory": ("first-request", "memory"),
    "batching": ("batching", "mixed", "tune", "overhead", "infer", "int8"),
    "training": ("training", "hourglass", "loading", "decoding", "held-out"),
    "words": ("words",),
}
"""The commands for which an extra brings what they need."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
for commands in (sweeps, inference, traffic, server, accuracy, training):
    app.add_typer(commands.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"carnelian-perf {version('carnelian-perf')}")
        raise typer.Exit


@app.callback()
def carnelian_perf(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measurements of a Carnelian server, of inference without one, and of training."""


def main() -> None:
    """Run the command; exit with status 0 if it succeeded, 1 if it failed, 2 if the command line itself is wrong."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("carnelian_perf").setLevel(logging.INFO)
    # A terminal in Latin-1 would end a command after its work. In the locale C, Python itself lets bytes through.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Otherwise gRPC, also in perf_analyzer, would use a proxy even for this machine's own addresses.
    exceptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if exceptions != "*":
        os.environ["no_proxy"] = ",".join(filter(None, [exceptions, "127.0.0.1,localhost,::1"]))
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit normally, so that servers are stopped
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, lambda *_: sys.exit(1))
    try:
        app()
    except ModuleNotFoundError as error:
        extra = _choose_extra(error.name or "")
        _fail(f"{error.name} is needed for this; install carnelian-perf's extra {extra}, as perf/README.md says", error)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(str(error) or type(error).__name__, error)


def _choose_extra(missing: str) -> str:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    extra = next((extra for extra, commands in EXTRAS.items() if command in commands), "batching")
    # Any command may be asked to serve random weights, which takes an export.
    return "batching" if missing.startswith("carnelian_export") and extra != "training" else extra


def _fail(message: str, cause: Exception) -> None:
    typer.echo(f"carnelian-perf: {message}", err=True)
    raise SystemExit(1) from cause
