"""Where a server is found."""

import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from carnelian_serving.launcher import Server


@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_ipv6_address_is_served(cut_repository: Path, connect: Callable[[str], Any], host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Server(cut_repository, host=host, http_port=0, grpc_port=0, metrics_port=0) as server:
        assert server.grpc_url.startswith("[::1]:")
        signals = np.ones((1, 4), np.float32)
        connect(server.grpc_url).infer("cut", SIGNAL=signals, LENGTH=np.full((1, 1), 2, np.int32))
        assert b"nv_inference_request_success" in urllib.request.urlopen(server.metrics_url).read()


def test_a_name_is_served_at_its_address(cut_repository: Path) -> None:
    with Server(cut_repository, host="localhost", http_port=0, grpc_port=0, metrics_port=0) as server:
        assert server.http_url.startswith("127.0.0.1:")


def test_a_server_whose_http_is_elsewhere_is_found_ready_there(cut_repository: Path) -> None:
    options = ["--http-address=127.0.0.2"]
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0, triton_options=options) as server:
        assert server.http_url.startswith("127.0.0.2:")
        urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready").read()
