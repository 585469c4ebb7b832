"""The serving container's command line as a process: what the chart renders is what carnelian-serve gets.

A Prometheus scrapes it: what rules, dashboard and autoscaling ask for is there, and follows the load.
"""

import io
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_client import AccessDenied, CarnelianClient, RetryPolicy, ServerBusy, Transcript

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "demo" / "clips" / "letter.wav"
LIMIT_S = 120
# kube-state-metrics' own, absent where only the server is scraped.
CLUSTER_SERIES = "kube_"


def test_all_probes_succeed(container):
    assert {name: container.get(path) for name, path in container.probes.items()} == dict.fromkeys(
        container.probes, 200
    )


def test_a_transcript_comes_through_mutual_tls(container, tls):
    with CarnelianClient(container.grpc, tls=tls) as client:
        assert client.transcribe(CLIP).text


def test_restricted_protocols_ask_for_the_key(container, tls):
    assert container.get("/v2/repository/index", method="POST") == 403
    assert container.get("/v2/repository/index", {"carnelian-admin-key": container.key}, "POST") == 200
    with CarnelianClient(container.grpc, tls=tls) as client, pytest.raises(AccessDenied):
        client.models()
    headers = {"triton-grpc-protocol-carnelian-admin-key": container.key}
    with CarnelianClient(container.grpc, tls=tls, headers=headers) as client:
        assert client.models()


def test_shared_memory_is_closed_and_statistics_are_open(container):
    assert container.get("/v2/systemsharedmemory/status") == 403
    assert container.get("/v2/models/quartznet_demo/stats") == 200


def test_latency_quantiles_are_among_the_metrics(container):
    with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=60) as answer:
        assert "nv_inference_request_summary_us" in answer.read().decode()


def test_the_log_says_little_and_never_the_key(container):
    log = container.log.read_text()
    starting, ready = log.splitlines()[:2]
    assert starting.startswith("carnelian-serve: starting tritonserver on ")
    assert ready.startswith("carnelian-serve: ready")
    assert container.key not in log


def count(container: Any) -> dict[str, float]:
    """Requests by model and outcome, since the server's start."""
    with urllib.request.urlopen(f"http://{container.metrics}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    counters = re.findall(r'^nv_inference_request_(success|failure)\{model="(\w+)".*\} (\S+)$', text, re.M)
    totals: Counter[str] = Counter()
    for outcome, model, value in counters:
        totals[f"{model} {outcome}"] += float(value)
    totals["refused"] = sum(map(float, re.findall(r"^carnelian_refused_requests_total\{.*\} (\S+)$", text, re.M)))
    return totals


def test_triton_counts_samples_that_fail_twice(container, wait_until):
    """The alerts halve the failures of `<model>_pcm` too."""
    inputs = [
        {"name": "SIGNAL", "datatype": "FP32", "shape": [1, 1], "data": [0]},
        {"name": "SIGNAL_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [0]},
    ]
    url = f"http://{container.http}/v2/models/quartznet_demo_pcm/infer"
    before = count(container)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, json.dumps({"inputs": inputs}).encode(), timeout=60)
    assert "no samples" in refused.value.read().decode()
    failures = "quartznet_demo_pcm failure"
    wait_until(lambda: count(container)[failures] >= before[failures] + 2)  # a moment after the answer
    assert count(container)[failures] - before[failures] == 2


def test_triton_counts_failures_as_the_alerts_assume(container, tls):
    """They halve an ensemble's failures; turned away is what never came through audio_decode, or was refused."""
    # Quick to send and slow to decode, because it is resampled: the queue fills up.
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(50 * 44_100, np.int16), 44_100, format="FLAC")
    broken = silence.getvalue()[:60] + bytes(4000)  # its header is whole, so that the client sends it as it is
    with CarnelianClient(container.grpc, tls=tls, retry=RetryPolicy(num_attempts=1), timeout_s=300) as client:
        before = count(container)
        outcomes = list(client.transcribe_many([broken]))  # by itself, or it may be turned away
        outcomes += client.transcribe_many([silence.getvalue()] * 200, concurrency=200)
    deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
    while time.monotonic() < deadline:
        moved = {name: value - before[name] for name, value in count(container).items()}
        if moved["quartznet_demo success"] + moved["quartznet_demo failure"] / 2 == len(outcomes):
            break
        time.sleep(0.2)
    turned_away = sum(isinstance(outcome, ServerBusy) for outcome in outcomes)
    failed = sum(not isinstance(outcome, Transcript) for outcome in outcomes)
    decoded = moved["audio_decode success"] + moved["audio_decode failure"]
    assert failed == turned_away + 1
    assert moved["quartznet_demo failure"] / 2 == failed
    never_decoded = failed - (decoded - moved["quartznet_demo success"])
    assert never_decoded + moved["refused"] == turned_away > 0


def stop_in_flight(running: Any) -> list[Any]:
    """Stops a server that is at work, and returns what its callers were told: Triton fails ensembles on their way."""
    clip = io.BytesIO()
    soundfile.write(clip, np.zeros(60 * 44_100, np.int16), 44_100, format="FLAC")  # slow: it is resampled
    with CarnelianClient(running.grpc, retry=RetryPolicy(num_attempts=1)) as client:
        outcomes = client.transcribe_many([clip.getvalue()] * 8, concurrency=8)
        threading.Timer(0.3, running.process.terminate).start()
        answers = list(outcomes)
    running.process.wait(timeout=60)
    return answers


def test_tritonserver_takes_the_native_arguments(render, start, tmp_path):
    values = ("runtime=native", "server.logLevel=error", "model.load={quartznet_demo}")
    native = start(render(*values).server, tmp_path / "native", ROOT / "model_repository")
    try:
        assert [native.get(path) for path in native.probes.values()] == [200, 200, 200]
        assert native.get("/v2/repository/index", method="POST") == 403
        with CarnelianClient(native.grpc) as client:
            assert client.transcribe(CLIP).text
        # What curl calls a form ends a server whose threads have stacks of the usual size.
        form = urllib.request.Request(f"http://{native.http}/v2/models/quartznet_demo/infer", bytes(24_000_000))
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(form, timeout=30)
        outcomes = stop_in_flight(native)
    finally:
        native.process.kill()
    assert native.process.wait() == 0
    assert all(isinstance(outcome, Transcript) or outcome.retryable for outcome in outcomes), outcomes


def fill(rule: dict[str, str], window: str) -> str:
    """The rule's query as prometheus-adapter would send it for one pod."""
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="speech",pod=~"server-0"')
    return query.replace("<<.GroupBy>>", "pod").replace("120s", window)


def test_every_panel_has_data_of_a_live_server(dashboard, prometheus):
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", prometheus.window)
            expression = expression.replace("$namespace", "speech").replace("$release", "speech-eu-carnelian")
            assert prometheus.wait_for(expression), panel["title"]


def test_every_rule_evaluates_over_a_live_server(groups, prometheus):
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
    assert len(prometheus.rules()) == sum(len(group["rules"]) for group in groups)
    for rule in (rule for group in groups for rule in group["rules"] if "record" in rule):
        assert prometheus.wait_for(re.sub(r"\[\d+m\]", f"[{prometheus.window}]", rule["expr"])), rule["record"]


def test_every_series_that_an_alert_asks_for_exists(alerts, prometheus):
    for alert in alerts:
        for name in set(re.findall(r"\b((?:nv|carnelian|kube)_\w+|up)\{", alert["expr"])):
            if not name.startswith(CLUSTER_SERIES):
                assert prometheus.wait_for(name), f"{alert['alert']} asks for {name}"


def test_the_adapter_s_queries_find_a_live_server(adapter_rule, prometheus):
    (series,) = {sample["pod"] for sample in prometheus.series(adapter_rule["seriesQuery"])}
    assert series == "server-0"
    (sample,) = prometheus.wait_for(fill(adapter_rule, prometheus.window))
    assert sample["metric"] == {"pod": "server-0"}


def test_keda_s_query_finds_a_live_server(render, prometheus):
    query = render(case="keda").one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    (sample,) = prometheus.wait_for(query.replace("120s", prometheus.window))
    assert float(sample["value"][1]) >= 0


def test_load_raises_the_metric_over_its_target_and_rest_lets_it_fall(render, adapter_rule, prometheus, container, tls):
    metric = render(case="monitoring").one("HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    target = float(metric["target"]["averageValue"])
    samples, rate_hz = soundfile.read(CLIP, dtype="int16")
    clip = io.BytesIO()
    soundfile.write(clip, np.tile(samples, 7), rate_hz, format="FLAC")  # 25 s: the server is at work, not its callers
    done = threading.Event()

    def call():
        with CarnelianClient(container.grpc, tls=tls) as client:
            while not done.is_set():
                client.transcribe(clip.getvalue())

    def wait_for(is_there):
        deadline = time.monotonic() + LIMIT_S
        while not is_there(value := float(prometheus.wait_for(fill(adapter_rule, prometheus.window))[0]["value"][1])):
            assert time.monotonic() < deadline, f"{value} s of audio in progress, target {target}"
            time.sleep(0.5)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        wait_for(lambda value: value > target)
    finally:
        done.set()
        for caller in callers:
            caller.join()
    wait_for(lambda value: value < target)
