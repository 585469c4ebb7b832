import asyncio
import contextlib
import errno
import gc
import io
import json
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import soundfile
from carnelian_client import (
    AsyncCarnelianClient,
    CarnelianClient,
    DeadlineExceeded,
    Health,
    InvalidAudio,
    InvalidOption,
    Model,
    RetryPolicy,
    ServerError,
    Transcript,
    Word,
)


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
    given_up, seen = threading.Event(), queue.SimpleQueue()

    def watch(request, context):
        given_up.wait(timeout=30)
        seen.put(context.is_active())
        return make_result("late")

    client.transcribe(wav, timeout_s=1000)
    assert triton.requests[0].parameters["timeout"].int64_param == pytest.approx(1e9, rel=0.05)
    triton.answer = watch
    while len(triton.requests) < 2:  # the time may be over before anything is sent
        with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
            client.transcribe(wav, timeout_s=0.5)
    gc.collect()
    given_up.set()
    assert seen.get(timeout=30)


@pytest.mark.parametrize("answer", [{}, {"text": "a"}, [], {"error": "odd"}])
def test_an_answer_of_another_kind_of_model_is_a_server_error(client, triton, wav, answer):
    triton.script = [lambda request, context: answer]
    with pytest.raises(ServerError):
        client.transcribe(wav)


BIG = 10**400


@pytest.mark.parametrize(
    "change",
    [
        {"text": 5},
        {"text": "a\x1b[2Jb"},
        {"text": "a\nb"},
        {"text": "a\x9bb"},
        {"text": "\udc9b"},
        {"model": None},
        {"confidence": []},
        {"confidence": True},
        {"duration": "1"},
        {"duration": -1.0},
        {"duration": float("inf")},
        {"words": None},
        {"words": [5]},
        {"words": {"word": 1}},
        {"words": {}},
        {"alternatives": ""},
        {"alternatives": [[]]},
        {"alternatives": [{"text": "a", "score": BIG, "acoustic": 0, "language": 0, "hotwords": 0}]},
        {"alternatives": [{"text": 1, "score": 0, "acoustic": 0, "language": 0, "hotwords": 0}]},
        {"rescored": "no"},
        {"new": float("nan")},
        {"new": json.loads("[" * 30 + "]" * 30)},
        *(
            {"words": [{"word": "a", "start": 0.0, "end": 0.5, "confidence": 0.9} | wrong]}
            for wrong in [
                {"word": 3},
                {"word": ""},
                {"word": "a b"},
                {"word": "a\r"},
                {"start": "a"},
                {"start": -1},
                {"start": float("nan")},
                {"end": None},
                {"end": 1e300},
                {"start": 2.0, "end": 1.0},
                {"confidence": []},
                {"confidence": BIG},
            ]
        ),
    ],
)
def test_a_result_that_no_format_can_write_is_a_server_error(client, triton, wav, make_result, change):
    triton.script = [lambda request, context: make_result("a") | change]
    with pytest.raises(ServerError, match="must hold RESULT"):
        client.transcribe(wav)


def test_a_result_that_nests_deeply_fails_alone(client, triton, wav):
    deep = b'{"words": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    triton.script = [lambda request, context: deep]
    first, second = client.transcribe_many([wav, wav], concurrency=1)
    assert isinstance(first, ServerError)
    assert isinstance(second, Transcript)


@pytest.mark.parametrize("word", ["a\u00a0b", "\u200dx", "\u2028", "\u3000", "\U0001f600", "\u0e35", "'"])
def test_any_character_that_a_label_may_be_is_heard(client, triton, wav, make_result, word):
    answer = make_result("a")
    answer["words"][0]["word"] = answer["text"] = word
    triton.script = [lambda request, context: answer]
    assert client.transcribe(wav).words[0].word == word


def test_an_error_inside_the_result_is_classified_like_any_other(client, triton, wav):
    triton.script = [lambda request, context: {"error": "samples are not finite"}]
    with pytest.raises(InvalidAudio, match="not finite"):
        client.transcribe(wav)
    triton.script = [lambda request, context: {"error": "wrong option: n_best must be a whole number"}]
    with pytest.raises(InvalidOption, match="n_best"):
        client.transcribe(wav)


def test_the_addresses_of_one_name_are_used_in_turn(start_endpoint, wav):
    first = start_endpoint("127.0.0.1:0")
    second = start_endpoint("127.0.0.2:" + first.url.rsplit(":", 1)[1])
    with CarnelianClient(f"ipv4:{first.url},{second.url}") as client:
        end = time.monotonic() + 30
        while not (first.triton.requests and second.triton.requests):
            assert time.monotonic() < end, "one of the two got no request within 30 s"
            client.transcribe(wav)


def test_an_answer_may_be_large(client, triton, wav, answers):
    """Many alternatives of a long clip are more than gRPC's usual 4 MiB."""
    triton.script = [answers("a", padding="x" * (5 << 20))]
    assert client.transcribe(wav).text == "a"


@pytest.mark.parametrize("compression", ["NoCompression", "Gzip"])
def test_an_answer_that_would_fill_the_memory_is_refused_once(client, triton, wav, make_result, compression):
    def fill(request, context):
        context.set_compression(grpc.Compression[compression])
        return make_result("a") | {"padding": "x" * (17 << 20)}

    triton.answer = fill
    with pytest.raises(ServerError, match="an answer must have at most 16 MiB"):
        client.transcribe(wav)
    assert len(triton.requests) == 1


def test_health_readiness_and_models(client):
    assert client.health() == Health(is_live=True, is_ready=False, server_version="2.51.0")
    assert client.is_ready()
    assert not client.is_ready("other")
    assert not client.is_ready("missing")
    assert client.models() == (
        Model("quartznet_demo", "1", True, "READY", ""),
        Model("other", "1", False, "LOADING", ""),
    )


@pytest.mark.parametrize("ask", ["is_ready", "health", "models"])
def test_the_time_for_a_question_reaches_the_server(endpoint, client, triton, ask):
    """gRPC tells it the time after which it ends the call."""

    async def run():
        async with AsyncCarnelianClient(endpoint.url) as asynchronous:
            await getattr(asynchronous, ask)(timeout_s=1000)

    getattr(client, ask)(timeout_s=1000)
    asyncio.run(run())
    num_calls = 3 if ask == "health" else 1
    assert triton.left_s == pytest.approx([1000] * 2 * num_calls, rel=0.05)


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


def test_threads_share_a_client(client, wav):
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(client.transcribe(wav).text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [f"{len(wav)} bytes"] * 8


@pytest.mark.parametrize("is_fed", [True, False])
def test_the_time_covers_a_pipe_that_is_read(client, triton, wav, tmp_path, is_fed):
    """It covered asking alone, and a pipe that nobody writes was waited for without an end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if is_fed:
        threading.Thread(target=pipe.write_bytes, args=[wav], daemon=True).start()
        assert client.transcribe(pipe).text == f"{len(wav)} bytes"
        return
    with pytest.raises(DeadlineExceeded, match=r"the clip was not read within 0\.2 s; allow more") as caught:
        client.transcribe(pipe, timeout_s=0.2, request_id="7")
    assert (caught.value.clip, caught.value.request_id) == (str(pipe), "7")
    assert triton.requests == []
    pipe.write_bytes(b"")  # lets the reader go


def test_what_is_decoded_too_slowly_is_not_sent(client, triton, monkeypatch):
    sink = io.BytesIO()
    soundfile.write(sink, np.zeros(20 * 16000), 16000, format="AIFF")
    monkeypatch.setattr("carnelian_client._decoding.BLOCK_FRAMES", 100)
    with pytest.raises(DeadlineExceeded, match="the clip was not read within"):
        client.transcribe(sink.getvalue(), timeout_s=0.001)
    assert triton.requests == []


def test_a_time_out_of_a_network_drive_is_the_drives(client, tmp_path, monkeypatch):
    def hang(*_):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out", "clip.wav")

    monkeypatch.setattr("carnelian_client._audio.read_all", hang)
    (tmp_path / "clip.wav").write_bytes(b"RIFF")
    with pytest.raises(OSError, match=r"Connection timed out: 'clip\.wav'"):
        client.transcribe(tmp_path / "clip.wav")


def test_a_gateway_that_waits_for_less_says_so_itself(client, triton, wav):
    triton.script = [("DEADLINE_EXCEEDED", "gateway: upstream timeout 1 s")]
    with pytest.raises(DeadlineExceeded, match="gateway: upstream timeout 1 s"):
        client.transcribe(wav, timeout_s=30)


def test_errors_of_this_side_say_what_they_are_about(client):
    with pytest.raises(InvalidAudio) as caught:
        client.transcribe(b"x", request_id="7")
    assert (caught.value.clip, caught.value.model, caught.value.request_id) == ("1 bytes", "quartznet_demo", "7")
    with pytest.raises(InvalidOption, match=r"'hotwords' must be .* but is \{'she': 2\}") as refused:
        client.transcribe(b"x", hotwords={"she": 2})
    assert refused.value.clip == "1 bytes"


def test_a_server_that_is_stopping_is_not_ready(endpoint, start_endpoint, monkeypatch):
    def stop(self, request, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, "Server not ready")

    monkeypatch.setattr(type(endpoint.triton), "ModelReady", stop)
    with CarnelianClient(start_endpoint().url) as client:  # of a servicer that was registered with it
        assert client.is_ready() is False
