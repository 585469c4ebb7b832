"""The serving container's command line as a process: what the chart renders is what carnelian-serve gets."""

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from carnelian_client import TLS, AccessDenied, CarnelianClient, CarnelianClientError

CLIP = Path(__file__).parents[2] / "demo" / "clips" / "letter.wav"


def test_all_probes_succeed(container: Any) -> None:
    assert {name: container.get(path) for name, path in container.probes.items()} == dict.fromkeys(
        container.probes, 200
    )


def test_a_transcript_comes_through_mutual_tls(container: Any, tls: TLS) -> None:
    with CarnelianClient(container.grpc, tls=tls) as client:
        assert client.transcribe(CLIP).text


def test_restricted_protocols_ask_for_the_key(container: Any, tls: TLS) -> None:
    assert container.get("/v2/repository/index", method="POST") == 403
    assert container.get("/v2/repository/index", {"carnelian-admin-key": container.key}, "POST") == 200
    with CarnelianClient(container.grpc, tls=tls) as client, pytest.raises(AccessDenied):
        client.models()
    headers = {"triton-grpc-protocol-carnelian-admin-key": container.key}
    with CarnelianClient(container.grpc, tls=tls, headers=headers) as client:
        assert client.models()


def test_shared_memory_is_closed_and_statistics_are_open(container: Any) -> None:
    assert container.get("/v2/systemsharedmemory/status") == 403
    assert container.get("/v2/models/quartznet_demo/stats") == 200


def test_latency_quantiles_are_among_the_metrics(container: Any) -> None:
    with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=4) as answer:
        assert "nv_inference_request_summary_us" in answer.read().decode()


def test_the_log_says_little_and_never_the_key(container: Any) -> None:
    log = container.log.read_text()
    assert log.startswith("carnelian-serve: ready")
    assert container.key not in log


def test_failures_are_counted_where_the_alerts_look(container: Any, tls: TLS) -> None:
    def failures(model: str) -> float:
        with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=4) as answer:
            counter = rf'^nv_inference_request_failure{{model="{model}",reason="BACKEND",version="1"}} (\S+)$'
            return float(re.search(counter, answer.read().decode(), re.M)[1])  # type: ignore[index]

    models = ("quartznet_demo", "audio_decode")
    before = {model: failures(model) for model in models}
    with CarnelianClient(container.grpc, tls=tls) as client, pytest.raises(CarnelianClientError):
        client.transcribe(b"no audio")
    assert {model: failures(model) - before[model] for model in models} == dict.fromkeys(models, 1)
