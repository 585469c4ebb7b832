import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from carnelian_client import (
    AccessDenied,
    Alternative,
    CarnelianClient,
    CarnelianClientError,
    ConnectError,
    DeadlineExceeded,
    Health,
    InvalidAudio,
    InvalidOption,
    Model,
    ModelNotFound,
    ModelNotReady,
    RetryPolicy,
    ServerBusy,
    ServerError,
    Transcript,
    TransportError,
    Word,
)
from carnelian_client._errors import STATUS_ERRORS

FAST = RetryPolicy(num_attempts=4, first_wait_s=0.01, longest_wait_s=0.02)
BUSY = ("UNAVAILABLE", "in ensemble 'm', [request id: 1] Exceeds maximum queue size")


@pytest.fixture
def client(endpoint):
    with CarnelianClient(endpoint.url, retry=FAST, timeout_s=5) as client:
        yield client


def test_a_clip_becomes_a_transcript(client, triton, wav, answers):
    triton.script = [answers("hello world")]
    transcript = client.transcribe(wav, request_id="7")
    assert transcript == Transcript(
        text="hello world",
        words=(Word("hello", 0.0, 0.5, 0.9), Word("world", 1.0, 1.5, 0.9)),
        confidence=0.9,
        duration_s=1.5,
        model="m",
        model_version="1",
        request_id="7",
        decoder="greedy",
        alternatives=(),
        raw={},
    )
    assert transcript.raw["decoder"] == "greedy"


def test_the_request_is_the_contracts(client, triton, wav):
    client.transcribe(wav, model="jasper")
    (request,) = triton.requests
    (audio,) = request.inputs
    assert (request.model_name, audio.name, audio.datatype, list(audio.shape)) == (
        "jasper",
        "AUDIO",
        "UINT8",
        [1, len(wav)],
    )
    assert list(request.raw_input_contents) == [wav]


def test_samples_are_sent_at_their_own_rate(client, triton):
    client.transcribe((np.zeros(441, np.float32), 44100))
    sent = triton.requests[0].raw_input_contents[0]
    assert int.from_bytes(sent[24:28], "little") == 44100


def test_request_ids_are_made_up_and_differ(client, triton, wav):
    first, second = client.transcribe(wav), client.transcribe(wav)
    assert first.request_id != second.request_id
    assert [r.id for r in triton.requests] == [first.request_id, second.request_id]
    with pytest.raises(TypeError, match="`request_id` must be a str, but is 7"):
        client.transcribe(wav, request_id=7)


def test_the_deadline_reaches_triton_and_the_call_outlasts_it(client, triton, wav, make_result):
    """Triton can crash where a call expires."""
    seen = []

    def watch(request, context):
        time.sleep(0.5)
        seen.append(context.is_active())
        return make_result("late")

    client.transcribe(wav, timeout_s=3)
    assert triton.requests[0].parameters["timeout"].int64_param == pytest.approx(3e6, rel=0.05)
    triton.script = [watch]
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.2 s"):
        client.transcribe(wav, timeout_s=0.2)
    gc.collect()
    while not seen:
        time.sleep(0.01)
    assert seen == [True]


def test_a_busy_server_is_asked_again_with_less_time(client, triton, wav):
    triton.script = [BUSY, ("NOT_FOUND", "Request for unknown model: 'm' has no available versions"), BUSY]
    assert client.transcribe(wav).text == f"{len(wav)} bytes"
    assert len({r.id for r in triton.requests}) == 1
    timeouts = [r.parameters["timeout"].int64_param for r in triton.requests]
    assert len(timeouts) == 4
    assert timeouts == sorted(timeouts, reverse=True)


def test_the_last_error_is_raised_when_the_attempts_are_used_up(client, triton, wav):
    triton.script = [BUSY] * 9
    with pytest.raises(ServerBusy, match="Exceeds maximum queue size"):
        client.transcribe(wav)
    assert len(triton.requests) == FAST.num_attempts


def test_no_attempt_is_made_after_the_deadline(endpoint, triton, wav):
    triton.script = [BUSY] * 1000
    patient = RetryPolicy(num_attempts=1000, first_wait_s=0.1, longest_wait_s=0.1)
    with CarnelianClient(endpoint.url, retry=patient) as client:
        start = time.monotonic()
        with pytest.raises((ServerBusy, DeadlineExceeded)):  # the latter if an attempt is on its way at the deadline
            client.transcribe(wav, timeout_s=1.0)
        assert time.monotonic() - start < 2.0  # for a busy machine; a thousand attempts would take 100 s
    assert 2 < len(triton.requests) < 50


def test_retries_are_logged_without_a_handler_of_ours(client, triton, wav, caplog):
    triton.script = [BUSY]
    with caplog.at_level(logging.INFO, "carnelian_client"):
        client.transcribe(wav)
    assert "attempt 1 failed" in caplog.text
    assert not logging.getLogger("carnelian_client").handlers


def test_a_slow_answer_is_a_deadline_exceeded(client, triton, wav, answers):
    triton.script = [answers("late", delay_s=1)]
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.1 s; allow more") as caught:
        client.transcribe(wav, timeout_s=0.1, request_id="7")
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.request_id == "7"
    assert len(triton.requests) == 1


@pytest.mark.parametrize("status", [s for s, kind in STATUS_ERRORS.items() if not kind.retryable])
def test_what_cannot_pass_is_not_retried(client, triton, wav, status):
    triton.script = [(status, "words")]
    with pytest.raises(CarnelianClientError, match=r"words|no answer within 5 s") as caught:
        client.transcribe(wav, request_id="7")
    assert type(caught.value) is STATUS_ERRORS[status]
    assert (caught.value.status, caught.value.request_id, caught.value.clip) == (
        status,
        "7",
        f"{len(wav)} bytes",
    )
    assert len(triton.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (("NOT_FOUND", "Request for unknown model: 'm' is not found"), ModelNotFound),
        (("INVALID_ARGUMENT", "in ensemble 'm', no samples"), InvalidAudio),
        (("UNAVAILABLE", "This protocol is restricted, expecting header 'k'"), AccessDenied),
        (("UNAVAILABLE", "in ensemble 'm', Request timeout expired"), DeadlineExceeded),
    ],
)
def test_useless_retries_are_not_made_whatever_the_status(client, triton, wav, answer, kind):
    triton.script = [answer]
    with pytest.raises(kind):
        client.transcribe(wav)
    assert len(triton.requests) == 1


@pytest.mark.parametrize("answer", [{}, {"text": "a"}, [], {"error": "odd"}])
def test_an_answer_of_another_kind_of_model_is_a_server_error(client, triton, wav, answer):
    triton.script = [lambda request, context: answer]
    with pytest.raises(ServerError):
        client.transcribe(wav)


def test_an_error_inside_the_result_is_classified_like_any_other(client, triton, wav):
    triton.script = [lambda request, context: {"error": "samples are not finite"}]
    with pytest.raises(InvalidAudio, match="not finite"):
        client.transcribe(wav)


def test_a_server_that_is_not_there_is_a_connect_error(start_endpoint, wav):
    endpoint = start_endpoint()
    endpoint.stop()
    with CarnelianClient(endpoint.url, retry=FAST) as client:
        with pytest.raises(ConnectError, match="check `url`"):
            client.transcribe(wav)
        assert not client.is_ready()
        with pytest.raises(ConnectError):
            client.health()


def test_a_server_that_comes_back_is_found_by_the_retries(start_endpoint, wav):
    endpoint = start_endpoint()
    with CarnelianClient(endpoint.url, retry=RetryPolicy(num_attempts=50, longest_wait_s=0.2)) as client:
        client.transcribe(wav)
        endpoint.stop()
        starter = threading.Timer(0.5, start_endpoint, [endpoint.url])
        starter.start()
        assert client.transcribe(wav, timeout_s=10).text == f"{len(wav)} bytes"
        starter.join()


def test_the_addresses_of_one_name_are_used_in_turn(start_endpoint, wav):
    first = start_endpoint("127.0.0.1:0")
    second = start_endpoint("127.0.0.2:" + first.url.rsplit(":", 1)[1])
    with CarnelianClient(f"ipv4:{first.url},{second.url}") as client:
        end = time.monotonic() + 5
        while not (first.triton.requests and second.triton.requests):
            assert time.monotonic() < end, "one of the two got no request within 5 s"
            client.transcribe(wav)


def test_health_readiness_and_models(client):
    assert client.health() == Health(is_live=True, is_ready=False, server_version="2.51.0")
    assert client.is_ready()
    assert not client.is_ready("other")
    assert not client.is_ready("missing")
    assert client.models() == (
        Model("quartznet_demo", "1", True, "READY", ""),
        Model("other", "1", False, "LOADING", ""),
    )


def test_a_closed_client_says_so(endpoint, wav):
    client = CarnelianClient(endpoint.url)
    client.close()
    for call in (client.health, client.models, client.is_ready, lambda: client.transcribe(wav)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_closing_ends_calls_in_flight(endpoint, triton, wav, answers):
    triton.script = [answers("late", delay_s=2)]
    client = CarnelianClient(endpoint.url)
    closer = threading.Timer(0.2, client.close)
    closer.start()
    start = time.monotonic()
    with pytest.raises(TransportError):
        client.transcribe(wav)
    assert time.monotonic() - start < 1
    closer.join()


def test_closing_ends_calls_between_two_attempts(start_endpoint, wav):
    endpoint = start_endpoint()
    endpoint.stop()
    retry = RetryPolicy(num_attempts=1000, first_wait_s=60, longest_wait_s=60)
    client = CarnelianClient(endpoint.url, timeout_s=600, retry=retry)
    closer = threading.Timer(0.5, client.close)
    closer.start()
    start = time.monotonic()
    with pytest.raises(TransportError, match="closed"):
        client.transcribe(wav)
    assert time.monotonic() - start < 5
    closer.join()


def carry(source, target, delay_s):
    """Hands on what arrives at one socket to another, late."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            time.sleep(delay_s)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_server_may_be_far_away(endpoint, wav):
    """A handshake of half a second, as with TLS between continents, is not given up."""
    host, _, port = endpoint.url.rpartition(":")
    with socket.create_server((host, 0)) as listening:

        def connect():
            with listening.accept()[0] as near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=carry, args=(far, near, 0.25))
                back.start()
                carry(near, far, 0.25)
                back.join()

        road = threading.Thread(target=connect)
        road.start()
        once = RetryPolicy(num_attempts=1)
        with CarnelianClient(f"{host}:{listening.getsockname()[1]}", retry=once) as client:
            assert client.is_ready()
            assert client.transcribe(wav).text == f"{len(wav)} bytes"
        road.join()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the process's sockets in /proc")
def test_a_connection_that_the_network_has_dropped_is_given_up(endpoint, client, wav):
    """The kernel ends it when what was sent is not acknowledged, so that calls do not fail on it for 15 minutes."""
    client.transcribe(wav)
    _, _, port = endpoint.url.rpartition(":")
    timeouts_ms = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and str(found.getpeername()[1]) == port:
                        timeouts_ms.add(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert timeouts_ms == {20_000}


def test_many_keep_their_order_and_their_number(client, triton, wav, make_result):
    def slow_for_the_first(request, context):
        size = len(request.raw_input_contents[0])
        time.sleep(0.3 if size == len(wav) else 0)
        return make_result(f"{size} bytes")

    triton.answer = slow_for_the_first
    clips = [wav + bytes(i) for i in range(40)]
    outcomes = list(client.transcribe_many(clips, concurrency=4))
    assert [o.text for o in outcomes] == [f"{len(c)} bytes" for c in clips]
    assert len(triton.requests) == len(clips)
    assert triton.most_running <= 4


def test_requests_of_many_overlap(client, triton, wav, answers):
    triton.script = [answers("late", delay_s=0.2)] * 8
    start = time.monotonic()
    list(client.transcribe_many([wav] * 8, concurrency=8))
    assert triton.most_running == 8
    assert time.monotonic() - start < 1


def test_a_failing_clip_does_not_cost_the_others_theirs(client, wav, tmp_path):
    silent = (np.zeros(0, np.float32), 16000)
    counted = (np.zeros(16000, np.int64), 16000)
    clips = [wav, silent, tmp_path / "missing.wav", counted, "a\0b.wav", "\ud800.wav", wav]
    assert [type(outcome) for outcome in client.transcribe_many(clips)] == [
        *(Transcript, InvalidAudio, FileNotFoundError, InvalidAudio, OSError, OSError, Transcript)
    ]


def test_failures_can_be_raised_in_their_place(client, wav):
    outcomes = client.transcribe_many([wav, b"", wav], return_exceptions=False)
    assert next(outcomes).text
    with pytest.raises(InvalidAudio):
        next(outcomes)


def test_many_takes_clips_as_room_comes_free(client, wav):
    taken = []

    def clips():
        for i in range(1000):
            taken.append(i)
            yield wav

    outcomes = client.transcribe_many(clips(), concurrency=2)
    assert not taken
    next(outcomes)
    assert len(taken) <= 4
    outcomes.close()


def test_a_list_is_taken_from_although_an_outcome_is_due(client, triton, wav):
    """The server must not idle behind a loop that works long on each outcome."""
    outcomes = client.transcribe_many([wav] * 1000, concurrency=2)
    for num_taken in range(1, 6):
        next(outcomes)
        end = time.monotonic() + 5
        while len(triton.requests) < num_taken + 3:
            assert time.monotonic() < end, "the window is not filled again"
            time.sleep(0.01)
    outcomes.close()


def test_an_error_of_the_iterable_comes_after_the_outcomes_due(client, wav):
    def clips():
        yield wav
        yield wav
        raise LookupError("no more")

    outcomes = client.transcribe_many(clips())
    assert next(outcomes).text == next(outcomes).text
    with pytest.raises(LookupError, match="no more"):
        next(outcomes)


def test_many_refuses_what_is_no_clip_and_no_concurrency(client):
    with pytest.raises(TypeError, match="must be a path"):
        list(client.transcribe_many([None]))
    with pytest.raises(ValueError, match="`concurrency` must be at least 1"):
        client.transcribe_many([], concurrency=0)


def test_nothing_to_do_is_no_mistake(client):
    assert list(client.transcribe_many([])) == []


def test_threads_share_a_client(client, wav):
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(client.transcribe(wav).text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [f"{len(wav)} bytes"] * 8


def test_model_not_ready_is_waited_for_and_then_raised(client, triton, wav):
    triton.script = [("NOT_FOUND", "Request for unknown model: 'm' has no available versions")] * 9
    with pytest.raises(ModelNotReady):
        client.transcribe(wav)
    assert len(triton.requests) == FAST.num_attempts


@pytest.mark.parametrize("clips", ["clip.wav", b"RIFF", Path("clip.wav")])
def test_one_clip_is_not_many(clips):
    with CarnelianClient() as client, pytest.raises(TypeError, match="must be an iterable of clips, but is one"):
        client.transcribe_many(clips)


def test_options_travel_as_request_parameters(client, triton, wav):
    client.transcribe(wav, decoder="beam", beam_width=20, lm_weight=0.5, hotwords=["ada", "charles babbage"])
    parameters = triton.requests[0].parameters
    assert parameters["decoder"].string_param == "beam"
    assert parameters["beam_width"].int64_param == 20
    assert parameters["lm_weight"].string_param == "0.5"
    assert json.loads(parameters["hotwords"].string_param) == ["ada", "charles babbage"]


def test_options_may_be_numbers_of_numpy(client, triton, wav):
    numbers = {"beam_width": np.int64(20), "lm_weight": np.float32(0.5), "rescore": np.bool_(True)}
    client.transcribe(wav, **numbers)
    parameters = triton.requests[0].parameters
    assert parameters["beam_width"].int64_param == 20
    assert parameters["lm_weight"].string_param == "0.5"
    assert parameters["rescore"].string_param == "true"


def test_alternatives_are_typed(client, triton, wav, answers):
    reading = {"text": "a b", "score": -1.5, "acoustic": -2.5, "language": 0.5, "hotwords": 0.5}
    triton.answer = answers("a b", alternatives=[reading], decoder="ngram")
    transcript = client.transcribe(wav, decoder="ngram", n_best=1)
    assert transcript.alternatives == (Alternative("a b", -1.5, -2.5, 0.5, 0.5),)
    assert (transcript.decoder, transcript.rescored) == ("ngram", False)  # of a server that knows no rescoring
    triton.answer = answers("a b", alternatives=[reading | {"neural": -3.25}], decoder="ngram", rescored=True)
    transcript = client.transcribe(wav, decoder="ngram", rescore=True, n_best=1)
    assert triton.requests[-1].parameters["rescore"].string_param == "true"
    assert transcript.alternatives[0].neural == -3.25
    assert transcript.rescored


def test_a_wrong_option_is_an_error_of_its_own(client, triton, wav):
    triton.script = [("INVALID_ARGUMENT", "in ensemble 'm', wrong option: n_best must be from 1")]
    with pytest.raises(InvalidOption, match="n_best must be from 1"):
        client.transcribe(wav, n_best=0)


def test_an_integer_of_any_size_reaches_the_server_which_says_what_is_allowed(client, triton, wav):
    client.transcribe(wav, beam_width=2**63)
    assert triton.requests[0].parameters["beam_width"].string_param == str(2**63)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 5}, "Triton keeps 'timeout' for itself; the time for a call is `timeout_s`"),
        ({"priority": 1}, "Triton keeps 'priority' for itself"),
        ({"hotwords": '["caf\udce9"]'}, r"option 'hotwords' must be text in UTF-8, but is '\[\"caf\\udce9"),
        ({"caf\udce9": 1}, r"option 'caf\\udce9' must be text in UTF-8"),
        ({"lm_weight": None}, "'lm_weight' must be a number, .* but is None"),
        ({"hotwords": iter(["ada"])}, "'hotwords' must be .* a list of strings"),
        ({"hotwords": [b"ada"]}, r"'hotwords' must be .* a list of strings, but is \[b'ada'\]"),
    ],
)
def test_what_cannot_be_an_option_is_refused_before_it_is_sent(client, triton, wav, options, message):
    with pytest.raises(InvalidOption, match=message):
        client.transcribe(wav, **options)
    assert [type(outcome) for outcome in client.transcribe_many([wav, wav], **options)] == [InvalidOption] * 2
    assert not triton.requests
