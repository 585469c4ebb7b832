"""Which utterances are found in live audio."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import soxr
from carnelian_client._result import transcript_from_result
from carnelian_client._stream import SPEECH_PAD_S, Stream

RATE = 16_000
BLOCK = 1600
NEAR_S = 0.5
"""How far an utterance may reach beyond the voice that is heard in it, margin included."""


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


def test_utterances_with_the_shortest_pause_between_share_nothing_and_are_whole(stream, voices):
    talk = np.tile(voices[0], 3)
    finals = finals_of(stream(pause_s=0.1), talk)
    assert len(finals) > 3
    for span in finals:
        np.testing.assert_array_equal(span.samples, talk[round(span.start_s * RATE) : round(span.end_s * RATE)])
    assert all(before.end_s <= after.start_s for before, after in pairwise(finals))


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
