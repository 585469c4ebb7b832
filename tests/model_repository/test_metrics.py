"""What <model>_ctc and audio_decode count beside Triton's own metrics."""

import re
import time
import urllib.request
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from carnelian_serving.launcher import Server
from tritonclient.grpc import InferenceServerException

MODEL = "quartznet_demo"
RATE_HZ = 16_000
FLAC = (Path(__file__).parents[2] / "demo" / "clips" / "storm.flac").read_bytes()


@pytest.fixture
def find(server):
    """Finds a pattern among the lines of the metrics."""

    def find(pattern):
        with urllib.request.urlopen(server.metrics_url, timeout=60) as answer:
            return re.findall(pattern, answer.read().decode(), re.M)

    return find


@pytest.fixture
def read(find):
    """Reads the counters: the name and its outcome, if any -> value."""

    def read():
        lines = find(r'^carnelian_(\w+)_total\{model="quartznet_demo"(?:,outcome="(\w+)")?\} (\S+)$')
        return {f"{name} {outcome}".strip(): float(value) for name, outcome, value in lines}

    return read


@pytest.fixture
def moved(read):
    """Tells by how much counters have moved since the test began."""
    before = None
    while before != (before := read()):
        time.sleep(0.3)  # the stage sends what it counts a moment later
    return lambda: {name: value - before[name] for name, value in read().items() if value != before[name]}


@pytest.fixture
def count(models, moved, wait_until):
    """Sends rows, and tells by how much counters have moved, once so many have."""

    def count(num_counters, model=f"{MODEL}_pcm", **request):
        with suppress(InferenceServerException):
            models.infer(model, **request)
        wait_until(lambda: len(moved()) >= num_counters)
        return moved()

    return count


def test_clips_and_their_seconds_are_counted(signals, count):
    signal = next(iter(signals.values()))
    rows = {"SIGNAL": np.stack([signal, signal * np.nan]), "SIGNAL_LENGTH": np.full((2, 1), len(signal), np.int32)}
    moved = count(5, **rows)
    assert moved["clips ok"] == 1
    assert moved["clips not_finite"] == 1
    assert moved["audio_seconds"] == pytest.approx(len(signal) / RATE_HZ, abs=0.05)
    assert moved["delivered_frames"] == moved["frames"] > 0  # equal rows need no padding
    assert set(moved) == {"clips ok", "clips not_finite", "audio_seconds", "delivered_frames", "frames"}


def test_a_wrong_option_is_counted_as_such(signals, count):
    signal = next(iter(signals.values()))
    rows = {"SIGNAL": signal[np.newaxis], "SIGNAL_LENGTH": np.int32([[len(signal)]])}
    assert count(3, parameters={"decoder": "best"}, **rows)["clips wrong_option"] == 1


def test_padding_counts_among_the_delivered_frames_alone(signals, count):
    signal = next(iter(signals.values()))
    lengths = np.int32([[len(signal)], [len(signal) // 2]])
    moved = count(4, SIGNAL=np.stack([signal, signal]), SIGNAL_LENGTH=lengths)
    assert moved["frames"] == pytest.approx(0.75 * moved["delivered_frames"], rel=0.02)


def test_a_wrong_length_counts_no_frames_but_those_that_are_there(count):
    scores = np.full((4, 8, 29), -np.log(29), np.float32)
    lengths = np.int32([[0], [-5], [5000], [2**31 - 1]])
    moved = count(4, model=f"{MODEL}_ctc", LOG_PROBS=scores, LOG_PROB_LENGTH=lengths)
    assert moved == {"clips no_samples": 2, "clips too_long": 2, "frames": 2 * 8, "delivered_frames": 4 * 8}


def test_batches_that_end_before_their_counts_are_sent_add_up(models, moved, wait_until):
    scores = np.full((1, 8, 29), -np.log(29), np.float32)
    for _ in range(20):
        models.infer(f"{MODEL}_ctc", LOG_PROBS=scores, LOG_PROB_LENGTH=np.int32([[8]]))
    wait_until(lambda: moved().get("clips ok") == 20)


def test_every_outcome_is_there_from_the_start(read):
    assert {name for name in read() if name.startswith("clips")} == {
        f"clips {outcome}"
        for outcome in ("ok", "no_samples", "too_short", "too_long", "not_finite", "wrong_option", "other")
    }


def test_files_that_cannot_be_decoded_are_counted_by_reason(server, find, models):
    """They were one number with all other errors of the ensemble."""
    if not isinstance(server, Server):
        pytest.skip("the native backend does not count them")

    def read():
        lines = find(r'^carnelian_decode_errors_total\{model="audio_decode",reason="(\w+)"\} (\S+)$')
        return {reason: float(value) for reason, value in lines}

    files = {
        "empty": [b""],
        "format": [b"a text", b"<html>"],
        "damaged": [FLAC[: len(FLAC) // 2]],
        "memory": [bytes(200 << 20)],
    }
    before = read()
    assert set(before) == set(files)
    for content in chain(*files.values()):
        with pytest.raises(InferenceServerException):
            models.infer(MODEL, AUDIO=np.frombuffer(content, np.uint8)[np.newaxis])
    models.infer(MODEL, AUDIO=np.frombuffer(FLAC, np.uint8)[np.newaxis])
    assert {reason: value - before[reason] for reason, value in read().items()} == {
        reason: len(contents) for reason, contents in files.items()
    }
