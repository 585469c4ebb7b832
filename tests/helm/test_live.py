"""The serving container's command line as a process: what the chart renders is what carnelian-serve gets."""

import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from carnelian_client import TLS, AccessDenied, CarnelianClient
from carnelian_serving.launcher import choose_ports

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "demo" / "clips" / "letter.wav"
KEY = "0123456789abcdef"
START_TIMEOUT_S = 120


class Container:
    """The serving container, without a container: its command, arguments and environment on free ports."""

    def __init__(self, server: dict[str, Any], secrets: Path) -> None:
        ports = choose_ports("127.0.0.1", {"8000": 0, "8001": 0, "8002": 0})
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports.values())
        self.probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        environment = {"CARNELIAN_ADMIN_KEY": KEY, "HOME": "/tmp"}
        arguments = [argument.replace("$(CARNELIAN_ADMIN_KEY)", KEY) for argument in server["args"]]
        arguments = [argument.replace("=/models", f"={ROOT / 'model_repository'}") for argument in arguments]
        arguments = [argument.replace("=/tls/", f"={secrets}/") for argument in arguments]
        for port, chosen in ports.items():
            arguments = [argument.replace(f"-port={port}", f"-port={chosen}") for argument in arguments]
        command = [str(Path(sys.executable).with_name(server["command"][0])), *arguments]
        self.log = secrets / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> int:
        request = urllib.request.Request(f"http://{self.http}{path}", headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=4) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def wait_until_started(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get(self.probes["startup"]) == 200:
                    return
            except (OSError, http.client.HTTPException):
                time.sleep(0.2)
        pytest.fail("the startup probe must succeed in two minutes")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tls.crt, tls.key and ca.crt, as in a Secret of kubernetes.io/tls; the certificate is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return folder


@pytest.fixture(scope="module")
def container(render: Callable[..., Any], secrets: Path) -> Iterator[Container]:
    """As rendered with mutual TLS and one thread; everything else is the chart's default."""
    running = Container(render("tls.secretName=tls", "tls.mutual=true", "server.threads=1").server, secrets)
    try:
        running.wait_until_started()
        yield running
    finally:
        status = running.stop()
    assert status == 0


@pytest.fixture
def tls(secrets: Path) -> TLS:
    return TLS(ca_path=secrets / "ca.crt", cert_path=secrets / "tls.crt", key_path=secrets / "tls.key")


def test_all_probes_succeed(container: Container) -> None:
    assert {name: container.get(path) for name, path in container.probes.items()} == dict.fromkeys(
        container.probes, 200
    )


def test_a_transcript_comes_through_mutual_tls(container: Container, tls: TLS) -> None:
    with CarnelianClient(container.grpc, tls=tls) as client:
        assert client.transcribe(CLIP).text


def test_restricted_protocols_ask_for_the_key(container: Container, tls: TLS) -> None:
    assert container.get("/v2/repository/index", method="POST") == 403
    assert container.get("/v2/repository/index", {"carnelian-admin-key": KEY}, "POST") == 200
    with CarnelianClient(container.grpc, tls=tls) as client, pytest.raises(AccessDenied):
        client.models()
    headers = {"triton-grpc-protocol-carnelian-admin-key": KEY}
    with CarnelianClient(container.grpc, tls=tls, headers=headers) as client:
        assert client.models()


def test_shared_memory_is_closed_and_statistics_are_open(container: Container) -> None:
    assert container.get("/v2/systemsharedmemory/status") == 403
    assert container.get("/v2/models/quartznet_demo/stats") == 200


def test_latency_quantiles_are_among_the_metrics(container: Container) -> None:
    with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=4) as answer:
        assert "nv_inference_request_summary_us" in answer.read().decode()


def test_the_log_says_little_and_never_the_key(container: Container) -> None:
    log = container.log.read_text()
    assert log.startswith("carnelian-serve: ready")
    assert KEY not in log
