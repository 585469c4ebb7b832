"""A release and its rollback under load, with what a cluster does played by hand: pods, a Service, their order."""

import asyncio
import contextlib
import itertools
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from carnelian_client import CarnelianClient, CarnelianClientError

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "demo" / "clips" / "letter.wav"
RELEASES = {"1": "old", "2": "new"}
NUM_CALLERS = 3
PAUSE_S = 0.05
LIMIT_S = 120
DELAY_S = 2
CONNECTION_AGE_S = 1
"""Of drain; the chart's defaults are longer, since a cluster's parts need time to notice."""


class Service:
    """Passes each new connection to the next endpoint and leaves the others alone, as kube-proxy does."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._pass_on, "127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _end(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.endpoints[next(self._turn) % len(self.endpoints)].partition(":")
        try:
            backend_reader, backend_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._copy(reader, backend_writer), self._copy(backend_reader, writer))
        except OSError:
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while block := await reader.read(1 << 16):
                writer.write(block)
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Load:
    """Callers that never stop; counts answers by the release that gave them, and keeps every error."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self._url = url
        self._done = threading.Event()
        self._callers = [threading.Thread(target=self._call) for _ in range(NUM_CALLERS)]

    def __enter__(self) -> "Load":
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for caller in self._callers:
            caller.join()

    def _call(self) -> None:
        with CarnelianClient(self._url) as client:
            while not self._done.wait(PAUSE_S):
                try:
                    self.answers[RELEASES[client.transcribe(CLIP).raw["version"]]] += 1
                except CarnelianClientError as error:
                    self.errors.append(error)

    def wait_for(self, release: str, more: int = 5) -> None:
        """Returns once a release has given `more` answers."""
        wanted, deadline = self.answers[release] + more, time.monotonic() + LIMIT_S
        while self.answers[release] < wanted:
            assert time.monotonic() < deadline, (self.answers, self.errors)
            time.sleep(0.05)


def write_release(folder: Path, name: str) -> Path:
    """Writes a repository whose answers say which release it is, by the version of the decoding stage."""
    shutil.copytree(ROOT / "model_repository", folder)
    [version] = [version for version, release in RELEASES.items() if release == name]
    (folder / "quartznet_demo_ctc" / "1").rename(folder / "quartznet_demo_ctc" / version)
    return folder


def test_no_request_is_lost_by_a_release_and_its_rollback(render, start, tmp_path):
    drain = (f"drain.connectionAgeSeconds={CONNECTION_AGE_S}", f"drain.delaySeconds={DELAY_S}")
    server = render("server.threads=1", "model.load={quartznet_demo}", *drain).server
    releases = {name: write_release(tmp_path / name, name) for name in ("old", "new")}
    service = Service()
    pods = [start(server, tmp_path / "pod-0", releases["old"])]
    service.endpoints = [pods[0].grpc]
    try:
        with Load(service.url) as load:
            load.wait_for("old")
            for number, release in enumerate(("new", "old"), 1):  # an update, then the rollback
                pods.append(start(server, tmp_path / f"pod-{number}", releases[release]))  # maxSurge 1
                service.endpoints = [pods[-1].grpc]  # ready in, leaving out, at once
                time.sleep(DELAY_S)  # preStop: goes on answering
                assert pods[-2].stop() == 0
                load.wait_for(release)
    finally:
        for pod in pods:
            if pod.process.poll() is None:
                pod.stop()
        service.close()
    assert load.errors == []
    assert set(load.answers) == {"old", "new"}
