"""What the feature stage does with more requests than the stages behind it can work on."""

import functools
import http.server
import shutil
import socket
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server

ROOT = Path(__file__).parents[2]
LIMIT = 2
REFUSED = 'carnelian_refused_requests_total{model="quartznet_demo_features"} '


@pytest.fixture
def narrow_repository(tmp_path) -> Path:
    """The shipped models, of which few requests may wait."""
    repository = tmp_path / "models"
    shutil.copytree(ROOT / "model_repository", repository)
    config = repository / "quartznet_demo_features" / "config.pbtxt"
    text = config.read_text()
    assert text.count('string_value: "128"') == 1
    config.write_text(text.replace('string_value: "128"', f'string_value: "{LIMIT}"'))
    return repository


@pytest.fixture
def serve(narrow_repository, make_server):
    """Makes a server of them that is as slow on many cores."""
    return functools.partial(make_server, narrow_repository, models=["quartznet_demo_pcm"], threads=1)


@pytest.fixture
def page(monkeypatch):
    """The handler of what that server takes for its metrics; answers 501 until it has a `do_GET`."""

    class Page(http.server.BaseHTTPRequestHandler):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setattr(Server, "metrics_url", f"http://127.0.0.1:{other.server_port}/metrics")
        yield Page
        other.shutdown()


def noise(seconds: float) -> dict[str, np.ndarray]:
    samples = np.random.default_rng(0).standard_normal((1, int(seconds * 16_000)), np.float32) / 10
    return {"SIGNAL": samples, "SIGNAL_LENGTH": np.int32([[samples.shape[1]]])}


def test_requests_are_turned_away_while_as_many_wait_as_may(serve, connect):
    with serve() as server:
        client = connect(server.grpc_url)
        alone = client.infer("quartznet_demo_pcm", **noise(2))["TRANSCRIPT"]
        # More than two batches of 32: the first is worked on, and the second may pass before any wait.
        answers = client.infer_at_once("quartznet_demo_pcm", [noise(10)] * 120)
        turned_away = [answer for answer in answers if isinstance(answer, Exception)]
        assert LIMIT <= len(answers) - len(turned_away) < 120
        for error in turned_away:
            assert "Exceeds maximum queue size: 2 requests may wait already for quartznet_demo_acoustic" in str(error)
            assert error.status() == "StatusCode.UNAVAILABLE"
        assert client.infer("quartznet_demo_pcm", **noise(2))["TRANSCRIPT"] == alone
        with urllib.request.urlopen(server.metrics_url, timeout=60) as answer:
            metrics = answer.read().decode()
    (refused,) = [line for line in metrics.splitlines() if line.startswith(REFUSED)]
    assert float(refused.removeprefix(REFUSED)) == len(turned_away)


def test_a_server_without_metrics_turns_nobody_away(serve, connect):
    with serve(triton_options=["--allow-metrics=false"]) as server:
        answers = connect(server.grpc_url).infer_at_once("quartznet_demo_pcm", [noise(5)] * 40)
        assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert not any("cannot be read" in line for line in server.log)  # whoever has that port was asked, each time
    assert sum("no request is turned away: the server keeps no metrics" in line for line in server.log) == 1


def test_while_the_metrics_do_not_come_in_time_no_more_pass(serve, connect, monkeypatch):
    """A slow server is one that has too much to do; each more that passed cost a second of standstill besides."""
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        monkeypatch.setattr(Server, "metrics_url", f"http://127.0.0.1:{hanging.getsockname()[1]}/metrics")
        with serve() as server:  # the limit is met by the warm-up, before there are any metrics
            hanging.listen()
            answers = connect(server.grpc_url).infer_at_once("quartznet_demo_pcm", [noise(2)] * 40)
    turned_away = [answer for answer in answers if isinstance(answer, Exception)]
    assert turned_away
    assert {error.status() for error in turned_away} == {"StatusCode.UNAVAILABLE"}
    assert sum("did not come within 1 s" in line for line in server.log) < len(turned_away)


def test_a_name_that_no_model_has_is_said(narrow_repository, serve, connect):
    config = narrow_repository / "quartznet_demo_features" / "config.pbtxt"
    config.write_text(config.read_text().replace("quartznet_demo_acoustic,quartznet_demo_ctc", "quartznet_acoustic"))
    with serve() as server:
        before = len(server.log)  # lines of the warm-up, which comes before metrics
        client = connect(server.grpc_url)
        urllib.request.urlopen(server.metrics_url, timeout=60).close()  # their port opens last
        for _ in range(LIMIT + 1):  # alone, so that they form no batch that may pass whole
            client.infer("quartznet_demo_pcm", **noise(2))
    assert any("the server has no model of `pending_models`" in line for line in server.log[before:])


def test_a_page_of_something_else_is_not_taken_for_metrics(serve, connect, page):
    with serve() as server:
        client = connect(server.grpc_url)
        for _ in range(LIMIT + 1):
            client.infer("quartznet_demo_pcm", **noise(2))
        log = list(server.log)
    assert any("cannot be read, so no request is turned away: it answers 501" in line for line in log)


def test_those_that_wait_for_different_stages_and_those_of_one_batch_add_up(narrow_repository, serve, connect, page):
    config = narrow_repository / "quartznet_demo_features" / "config.pbtxt"
    batches = f"preferred_batch_size: {LIMIT}\n  max_queue_delay_microseconds: 30000000"
    text = config.read_text()
    assert text.count("preferred_batch_size: 1\n") == 1
    config.write_text(text.replace("preferred_batch_size: 1", batches))
    num_waiting = 0

    def answer(request):
        request.send_response(200)
        request.end_headers()
        for stage in ("acoustic", "ctc"):
            line = f'nv_inference_pending_request_count{{model="quartznet_demo_{stage}",version="1"}} {num_waiting}\n'
            request.wfile.write(line.encode())

    page.do_GET = answer
    with serve(models=["quartznet_demo_features"]) as server:
        client = connect(server.grpc_url)
        # The warm-up made an even number of batches of one clip, so the next one begins to count anew.
        passed = client.infer_at_once("quartznet_demo_features", [noise(2)] * LIMIT)
        num_waiting = LIMIT // 2
        refused = client.infer_at_once("quartznet_demo_features", [noise(2)] * LIMIT)
    assert not [answer for answer in passed if isinstance(answer, Exception)]
    assert ["Exceeds maximum queue size" in str(error) for error in refused] == [True] * LIMIT


@pytest.mark.parametrize(
    ("parameters", "advice"),
    [
        ('parameters { key: "max_pending_requests" value { string_value: "9" } }', "or neither"),
        ('parameters { key: "pending_models" value { string_value: "other" } }', "or neither"),
        (
            'parameters { key: "max_pending_requests" value { string_value: "0" } }'
            'parameters { key: "pending_models" value { string_value: "other" } }',
            "must be at least 1, but is 0",
        ),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(cut_repository, parameters, advice, make_server):
    with (cut_repository / "cut" / "config.pbtxt").open("a") as config:
        config.write(parameters)
    with pytest.raises(ServerError, match=advice):
        make_server(cut_repository).start()
