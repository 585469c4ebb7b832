"""The server under test: start it or connect to it, and examine what it serves."""

import contextlib
import hashlib
import http.client
import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carnelian_client import CarnelianClient
from tritonclient import grpc

from carnelian_perf.accuracy.served import list_ready
from carnelian_perf.accuracy.served import measure as measure_accuracy
from carnelian_perf.load import REQUEST_TIMEOUT_S
from carnelian_perf.sweeps.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server under test."""

    client: Any
    """The `tritonclient.grpc.InferenceServerClient` of the server."""
    urls: dict[str, str]
    """Protocol (grpc, http) -> host:port; the grid of a server that already runs may leave http out."""
    pid: int | None
    """Process ID of the server; None if it was not started here."""

    def ask(self, question: Callable[..., Any], *subjects: str) -> Any:
        """Call `question`, a method of the client, with `subjects`.

        Raises:
            RuntimeError: The server answers with an error, or not within :data:`REQUEST_TIMEOUT_S`; the message says
                what to do.
        """
        try:
            return question(*subjects, client_timeout=REQUEST_TIMEOUT_S)
        except grpc.InferenceServerException as error:
            raise RuntimeError(
                f"the server at {self.urls['grpc']} must answer `{question.__name__}` over gRPC, but: "
                f"{error.message()}; "
                + self.say_how_to_go_on(
                    "see that it runs (`carnelian-serve`), without TLS, that this is its gRPC address, and that its "
                    "models are loaded"
                )
            ) from error

    def say_how_to_go_on(self, repair: str) -> str:
        """Say in words what to do about a server that failed: `repair`, unless the sweep starts its server itself."""
        return f"{'' if self.pid else f'{repair}, then '}run the same command again: cells that are done are kept"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model as the server serves it."""

    backend: str
    """Triton backend of the acoustic stage."""
    stages: list[str]
    configuration: str
    """SHA-256 of the served configurations, see :class:`carnelian_perf.sweeps.results.Result`."""
    accuracy: dict[str, float]
    """Error rates on the manifest, see :class:`carnelian_perf.sweeps.results.Result`."""


@contextlib.contextmanager
def open_target(grid: Grid, scratch: Path) -> Iterator[Target]:
    """Yield the server that the grid names, or start one; networks with random weights are exported to `scratch`."""
    with contextlib.ExitStack() as stack:
        if grid.server is not None:
            urls, pid = {"grpc": grid.server.grpc}, None
            if grid.server.http is not None:
                urls["http"] = grid.server.http
        else:
            from carnelian_perf.launch import quiet_server

            repository = grid.repository
            if grid.random_weights:
                from carnelian_perf.networks import export_random

                repository = scratch / "models"
                for name, source in grid.random_weights.items():
                    tested = grid.models[name]
                    export_random(repository, name, source, tested.precision, tested.execution_provider)
            server = stack.enter_context(quiet_server(repository))
            urls, pid = {"grpc": server.grpc_url, "http": server.http_url}, server.pid
        client = stack.enter_context(grpc.InferenceServerClient(urls["grpc"]))
        yield Target(client=client, urls=urls, pid=pid)


def examine(target: Target, grid: Grid, model: str) -> Served:
    """Find what is served under a model's name, and measure its error rates on the manifest.

    Raises:
        RuntimeError: The model is not ready, is no recogniser, fails on a clip, or caches its answers.
    """
    client = target.client
    names = [model, *([f"{model}_pcm"] if grid.static else [])]
    for name in names:
        if not target.ask(client.is_model_ready, name):
            raise RuntimeError(
                f"`models` must be served and ready, but {name!r} is not; the server {_list_models(target)}"
            )
    stages = [step.model_name for step in _read_config(target, model).ensemble_scheduling.step]
    if f"{model}_acoustic" not in stages:
        raise RuntimeError(
            f"`models` must name recognisers, but {model!r} has no stage {model}_acoustic; the server "
            f"{_list_models(target)}"
        )
    for name in (*names, *stages):
        if _read_config(target, name).response_cache.enable:
            raise RuntimeError(
                f"{name} must compute every answer, but has `response_cache` enabled, which answers repeated clips "
                "without computing; serve it without for a sweep"
            )
    configuration = digest(target, (*stages, model))  # before its error rates, which take minutes

    accuracy: dict[str, float] = {}
    if not grid.random_weights:
        found = measure_accuracy(grid.manifest, target.urls["grpc"], model)
        if found.failures:
            raise RuntimeError(
                f"{model} must transcribe every clip of {grid.manifest}, but failed on {len(found.failures)} "
                f"of {len(found.outcomes)}, first: {found.failures[0]}"
            )
        rates = found.error_rates()
        shares = {"wer": rates.wer, "cer": rates.cer} if rates.words else {}
        accuracy = {**shares, "utterances": rates.utterances, "words": rates.words}
    return Served(
        backend=_read_config(target, f"{model}_acoustic").backend,
        stages=stages,
        configuration=configuration,
        accuracy=accuracy,
    )


def digest(target: Target, models: Sequence[str]) -> str:
    """Compute the SHA-256 of the configurations and versions of models, as the server gives them."""
    told = hashlib.sha256()
    for model in models:
        told.update(_read_config(target, model).SerializeToString(deterministic=True))
        versions = target.ask(target.client.get_model_metadata, model).versions
        told.update(repr(sorted(versions)).encode())
    return told.hexdigest()


def _read_config(target: Target, model: str) -> Any:
    return target.ask(target.client.get_model_config, model).config


def _list_models(target: Target) -> str:
    with CarnelianClient(target.urls["grpc"]) as client:
        ready = list_ready(client)
    return f"has {ready}" if ready else "has none that is ready, or does not tell"


def check_http(url: str) -> None:
    """Check that the server answers over HTTP; otherwise perf_analyzer would fail in every cell, without advice.

    Raises:
        RuntimeError: It does not answer.
    """
    try:
        with urllib.request.urlopen(f"http://{url.removeprefix('http://')}/v2", timeout=10) as answer:
            found = json.load(answer)
        if isinstance(found, dict) and "extensions" in found:  # a metrics endpoint answers any path
            return
        reason = "it is not Triton's"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
    raise RuntimeError(
        f"`server.http` of the grid must be host:port of the HTTP endpoint of a server, but {url} "
        f"does not answer as one: {reason}"
    )
