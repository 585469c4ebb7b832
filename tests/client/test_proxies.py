"""The configurations of serving/docs/proxies.md: the real nginx and HAProxy before the real server."""

import gzip
import runpy
import shutil
import ssl
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from carnelian_client import TLS, AccessDenied, CarnelianClient, ServerBusy, ServerError
from tritonclient.grpc import service_pb2, service_pb2_grpc

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "serving" / "docs" / "proxies.py"))


def skip_without(program):
    try:
        SCRIPT["find"](program)
    except RuntimeError as error:
        pytest.skip(str(error))  # it is not installed


@pytest.fixture(scope="module", params=SCRIPT["PROXIES"])
def proxy(request, server, tmp_path_factory):
    """A `Proxy` of the script that runs."""
    skip_without(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    with SCRIPT["Proxy"](request.param, (server, server), folder) as running:
        time.sleep(SCRIPT["CHECKED_S"] if request.param == "haproxy" else 0)
        yield running


@pytest.fixture
def client(proxy):
    with CarnelianClient(f"localhost:{proxy.port}", tls=TLS(ca_path=proxy.certificate)) as client:
        yield client


def test_clips_of_every_length_pass(client, server):
    assert client.is_ready()
    assert client.health().is_ready
    noise = np.random.default_rng(0).normal(0, 0.05, 58 * 16000).astype(np.float32)
    with CarnelianClient(server.grpc_url) as direct:
        for clip in (noise[:16000], noise):  # 58 s are more than nginx takes by default
            assert client.transcribe((clip, 16000)).text == direct.transcribe((clip, 16000)).text


def test_the_common_question_for_health_passes(proxy):
    credentials = grpc.ssl_channel_credentials(proxy.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{proxy.port}", credentials) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"  # SERVING


def test_what_clients_do_not_need_is_closed(client):
    with pytest.raises(ServerError, match="status: 404"):
        client.models()


def test_packed_requests_are_refused(proxy):
    credentials = grpc.ssl_channel_credentials(proxy.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{proxy.port}", credentials) as channel:
        message = service_pb2.ModelInferRequest(model_name="quartznet_demo", id="a" * 4096)
        with pytest.raises(grpc.RpcError, match="status: 415"):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                message, timeout=30, compression=grpc.Compression.Gzip
            )


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("encodings", [("identity", "gzip"), ("gzip", "identity"), ("identity, gzip",)])
def test_packed_requests_are_refused_whatever_else_they_say(encodings, proxy, wav, tmp_path):
    message = service_pb2.ModelInferRequest(model_name="quartznet_demo", raw_input_contents=[wav])
    message.inputs.add(name="AUDIO", datatype="UINT8", shape=[1, len(wav)])
    body, url = tmp_path / "body", f"https://localhost:{proxy.port}/inference.GRPCInferenceService/ModelInfer"
    plain = message.SerializeToString()
    for is_packed, data, said in ((False, plain, ("identity",)), (True, gzip.compress(plain), encodings)):
        body.write_bytes(struct.pack(">?I", is_packed, len(data)) + data)
        headers = ["Content-Type: application/grpc", "TE: trailers", *(f"grpc-encoding: {each}" for each in said)]
        command = ["curl", "-sk", "--http2", "--data-binary", f"@{body}", *(f"-H{each}" for each in headers), url]
        answer = subprocess.run(command, capture_output=True, timeout=60).stdout
        assert (b"TRANSCRIPT" in answer) == (not is_packed)


def test_http_passes_nginx_with_a_content_type_that_triton_survives(proxy, wav):
    if proxy.program != "nginx":
        pytest.skip("the page's HAProxy passes gRPC alone")
    context = ssl.create_default_context(cafile=proxy.certificate)
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/x-www-form-urlencoded"}
    # Within nginx's limit, and over what a form may have.
    form = wav + bytes(31 * 2**20)
    url = f"https://localhost:{proxy.port}/v2"
    for body in (wav, form):
        request = urllib.request.Request(f"{url}/models/quartznet_demo/infer", body, headers)
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            assert b"TRANSCRIPT" in answer.read()
    for closed in ("repository/index", "models/quartznet_demo_ctc/infer", "models/audio_decode/infer"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/{closed}", b"", timeout=60, context=context)
    with urllib.request.urlopen(f"{url}/models/quartznet_demo", timeout=60, context=context) as answer:
        assert b"AUDIO" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):  # its name is not a model's
        urllib.request.urlopen(f"{url}/models/stats", timeout=60, context=context)


def test_web_pages_may_call_with_the_lines_of_the_page(server, wav, tmp_path):
    skip_without("nginx")
    marks = r"# (?=add_header|if \(\$request_method)"
    with SCRIPT["Proxy"]("nginx", (server, server), tmp_path, without=marks) as proxy:
        context = ssl.create_default_context(cafile=proxy.certificate)
        url = f"https://localhost:{proxy.port}/v2/models/quartznet_demo/infer"
        headers = {"Inference-Header-Content-Length": "0"}
        preflight = urllib.request.Request(url, headers=headers, method="OPTIONS")
        for request in (preflight, urllib.request.Request(url, wav, headers)):
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example.com"
                assert "inference-header-content-length" in answer.headers["Access-Control-Allow-Headers"]
                body = answer.read()
        assert b"TRANSCRIPT" in body


def test_each_caller_has_a_share_with_the_lines_of_the_page(server, tmp_path):
    skip_without("nginx")
    marks = r"# (?=map|limit_req_zone|if \(\$caller)"
    proxy = SCRIPT["Proxy"]("nginx", (server, server), tmp_path, without=marks)
    configuration = proxy.file.read_text()
    assert "rate=20r/s" in configuration
    assert " burst=40;" in configuration
    proxy.file.write_text(configuration.replace("rate=20r/s", "rate=1r/m").replace(" burst=40;", ";"))

    def ask(key):
        with CarnelianClient(f"localhost:{proxy.port}", tls=TLS(ca_path=proxy.certificate), api_key=key) as client:
            return client.is_ready()

    with proxy:
        assert ask("KEY-A")
        with pytest.raises(ServerBusy, match="limits the requests"):
            ask("KEY-A")
        assert ask("KEY-B")
        for key in ("KEY-C", None):
            with pytest.raises(AccessDenied, match="if it wants a key"):
                ask(key)


def test_the_script_ends_if_an_event_cannot_be_made(proxy, server):
    def fail(*_):
        raise ConnectionRefusedError("no stats socket")

    with pytest.raises(ConnectionRefusedError, match="no stats socket"):
        SCRIPT["count_failures"](proxy, server, fail, 1)


def test_the_script_sends_as_its_page_says():
    how = f"A client sends clips, {SCRIPT['CONCURRENCY']} at a time, with {SCRIPT['ATTEMPTS']} attempts for each "
    assert how in SCRIPT["PAGE"].read_text()
