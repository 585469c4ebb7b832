"""The configurations of serving/docs/proxies.md: the real nginx and HAProxy before the real server."""

import runpy
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from carnelian_client import TLS, CarnelianClient, ServerError
from tritonclient.grpc import service_pb2, service_pb2_grpc

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "serving" / "docs" / "proxies.py"))


@pytest.fixture(scope="module", params=SCRIPT["PROXIES"])
def proxy(request, server, tmp_path_factory) -> Iterator[tuple[str, str, Path]]:
    """A proxy that runs: its name, its address, and the certificate to trust."""
    if SCRIPT["find"](request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    with SCRIPT["Proxy"](request.param, (server, server), folder) as running:
        time.sleep(SCRIPT["CHECKED_S"] if request.param == "haproxy" else 0)
        yield request.param, f"localhost:{running.port}", running.certificate


@pytest.fixture
def client(proxy):
    _, url, certificate = proxy
    with CarnelianClient(url, tls=TLS(ca_path=certificate)) as client:
        yield client


def test_clips_of_every_length_pass(client, server):
    assert client.is_ready()
    assert client.health().is_ready
    noise = np.random.default_rng(0).normal(0, 0.05, 58 * 16000).astype(np.float32)
    with CarnelianClient(server.grpc_url) as direct:
        for clip in (noise[:16000], noise):  # 58 s are more than nginx takes by default
            assert client.transcribe((clip, 16000)).text == direct.transcribe((clip, 16000)).text


def test_what_clients_do_not_need_is_closed(client):
    with pytest.raises(ServerError, match="status: 404"):
        client.models()


def test_packed_requests_are_refused(proxy):
    _, url, certificate = proxy
    with grpc.secure_channel(url, grpc.ssl_channel_credentials(certificate.read_bytes())) as channel:
        message = service_pb2.ModelInferRequest(model_name="quartznet_demo", id="a" * 4096)
        with pytest.raises(grpc.RpcError, match="status: 415"):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                message, timeout=30, compression=grpc.Compression.Gzip
            )


def test_http_passes_nginx_with_a_content_type_that_triton_survives(proxy, wav):
    program, url, certificate = proxy
    if program != "nginx":
        pytest.skip("the page's HAProxy passes gRPC alone")
    context = ssl.create_default_context(cafile=certificate)
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/x-www-form-urlencoded"}
    # Within nginx's limit, and over what a form may have.
    form = wav + bytes(31 * 2**20)
    for body in (wav, form):
        request = urllib.request.Request(f"https://{url}/v2/models/quartznet_demo/infer", body, headers)
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            assert b"TRANSCRIPT" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"https://{url}/v2/repository/index", b"", timeout=60, context=context)
