"""The configurations of serving/docs/proxies.md: the real nginx and HAProxy before the real server."""

import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from carnelian_client import TLS, CarnelianClient, ServerError
from carnelian_serving.addresses import choose_ports
from tritonclient.grpc import service_pb2, service_pb2_grpc

PAGE = Path(__file__).parents[2] / "serving" / "docs" / "proxies.md"
START_TIMEOUT_S = 20
CHECKED_S = 5
"""After this time HAProxy has given up a server whose checks fail, two of them, each after a second at most."""


def configuration(program, server, port, folder):
    """The page's configuration, with the addresses and files of a test."""
    (text,) = re.findall(rf"^```{program}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"10\.0\.0\.\d:8001", server.grpc_url, text)
    text = re.sub(r"10\.0\.0\.\d:8000", server.http_url, text)
    text = text.replace("port 8000", f"port {server.http_url.rpartition(':')[2]}")
    text = re.sub(r"/etc/(nginx|haproxy)/", f"{folder}/", text)
    if program == "haproxy":
        return text.replace("bind :443", f"bind 127.0.0.1:{port}")
    own = "".join(f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    text = text.replace("http {", f"http {{ access_log off; {own}", 1).replace("listen 443", f"listen 127.0.0.1:{port}")
    return f"daemon off; user root; pid {folder}/nginx.pid; error_log stderr; events {{ }}\n{text}"


@pytest.fixture(scope="module", params=["nginx", "haproxy"])
def proxy(request, server, tmp_path_factory) -> Iterator[tuple[str, str, Path]]:
    """A proxy that runs: its name, its address, and the certificate to trust."""
    program = shutil.which(request.param, path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    certificate, key = folder / "speech.crt", folder / "speech.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "speech.pem").write_text(certificate.read_text() + key.read_text())
    port = choose_ports("127.0.0.1", {"grpc": 0})["grpc"]
    file = folder / "configuration"
    file.write_text(configuration(request.param, server, port, folder))
    options = ["-p", folder, "-c", file] if request.param == "nginx" else ["-db", "-f", file]
    with (folder / "log").open("w") as log, subprocess.Popen([program, *options], stdout=log, stderr=log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"{request.param} must take connections, but: {(folder / 'log').read_text()}")
            time.sleep(0.05)
        time.sleep(CHECKED_S if request.param == "haproxy" else 0)
        yield request.param, f"localhost:{port}", certificate
        process.terminate()


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


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
