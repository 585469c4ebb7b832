"""Where a server is found."""

import socket
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException


@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_ipv6_address_is_served(cut_repository, connect, host, make_server):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with make_server(cut_repository, host=host) as server:
        assert server.grpc_url.startswith("[::1]:")
        signals = np.ones((1, 4), np.float32)
        connect(server.grpc_url).infer("cut", SIGNAL=signals, LENGTH=np.full((1, 1), 2, np.int32))
        assert b"nv_inference_request_success" in urllib.request.urlopen(server.metrics_url).read()


def test_a_name_is_served_at_its_address(cut_repository, make_server):
    with make_server(cut_repository, host="localhost") as server:
        assert server.http_url.startswith("127.0.0.1:")


def test_a_server_whose_http_is_elsewhere_is_found_ready_there(cut_repository, make_server):
    options = ["--http-address=127.0.0.2"]
    with make_server(cut_repository, triton_options=options) as server:
        assert server.http_url.startswith("127.0.0.2:")
        urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready").read()


def test_where_other_machines_reach_it_nobody_has_its_memory_read_or_written(cut_repository, connect, make_server):
    with make_server(cut_repository, host="0.0.0.0") as server:
        models = connect(server.grpc_url)
        with pytest.raises(InferenceServerException, match=r"restricted.*closed-by-carnelian-serve"):
            models.client.register_system_shared_memory("own", "/own", 64)
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(f"http://{server.http_url}/v2/systemsharedmemory/status", timeout=60)
        refused.value.close()
        models.infer("cut", SIGNAL=np.ones((1, 4), np.float32), LENGTH=np.full((1, 1), 2, np.int32))


def test_on_this_machine_alone_clients_may_use_shared_memory(tiny_server, client):
    assert not client.client.get_system_shared_memory_status().regions
    with urllib.request.urlopen(f"http://{tiny_server.http_url}/v2/systemsharedmemory/status", timeout=60) as answer:
        assert answer.status == 200


def test_no_port_is_opened_for_vertex_ai(cut_repository, monkeypatch, make_server):
    """Triton opened it on every address, and in the place of its own."""
    routes = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health", "AIP_MODE": "PREDICTION"}
    for name, value in routes.items():
        monkeypatch.setenv(name, value)
    with make_server(cut_repository, ready_timeout_s=60) as server:
        assert b"AIP_" not in Path(f"/proc/{server.pid}/environ").read_bytes()
        with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=60) as answer:
            assert answer.status == 200
