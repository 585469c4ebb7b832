"""The serving container's command line as a process: what the chart renders is what carnelian-serve gets."""

import io
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_client import TLS, AccessDenied, CarnelianClient, RetryPolicy, ServerBusy, Transcript

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "demo" / "clips" / "letter.wav"


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


def test_triton_counts_failures_as_the_alerts_assume(container: Any, tls: TLS) -> None:
    """They halve an ensemble's failures, and take what never came through audio_decode as turned away."""

    def count() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        counters = re.findall(r'^nv_inference_request_(success|failure)\{model="(\w+)".*\} (\S+)$', text, re.M)
        totals: Counter[str] = Counter()
        for outcome, model, value in counters:
            totals[f"{model} {outcome}"] += float(value)
        return totals

    broken = b"fLaC" + bytes(4000)
    # Quick to send and slow to decode, because it is resampled: the queue fills up.
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(16 * 44_100, np.int16), 44_100, format="FLAC")
    with CarnelianClient(container.grpc, tls=tls, retry=RetryPolicy(num_attempts=1), timeout_s=300) as client:
        before = count()
        outcomes = list(client.transcribe_many([broken, *[silence.getvalue()] * 200], concurrency=200))
    deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
    while time.monotonic() < deadline:
        moved = {name: value - before[name] for name, value in count().items()}
        if moved["quartznet_demo success"] == sum(isinstance(outcome, Transcript) for outcome in outcomes):
            break
        time.sleep(0.2)
    turned_away = sum(isinstance(outcome, ServerBusy) for outcome in outcomes)
    failed = sum(not isinstance(outcome, Transcript) for outcome in outcomes)
    decoded = moved["audio_decode success"] + moved["audio_decode failure"]
    assert failed == turned_away + 1
    assert moved["quartznet_demo failure"] / 2 == failed
    assert moved["quartznet_demo failure"] / 2 - (decoded - moved["quartznet_demo success"]) == turned_away > 0


def test_tritonserver_takes_the_native_arguments(
    render: Callable[..., Any], start: Callable[..., Any], tmp_path: Path
) -> None:
    values = ("runtime=native", "server.logLevel=error", "model.load={quartznet_demo}")
    native = start(render(*values).server, tmp_path / "native", ROOT / "model_repository")
    try:
        assert [native.get(path) for path in native.probes.values()] == [200, 200, 200]
        assert native.get("/v2/repository/index", method="POST") == 403
        with CarnelianClient(native.grpc) as client:
            assert client.transcribe(CLIP).text
    finally:
        status = native.stop()
    assert status == 0
