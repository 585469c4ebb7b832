"""The first law: a transcript depends on its audio alone, not on batch, neighbours, length or way in."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from carnelian_client import Transcript

MODEL = "quartznet_demo"
RATE_HZ = 16_000
LIMIT_SAMPLES = 60 * RATE_HZ
LOG_PROB_TOLERANCE = 1e-3
"""float32 sums of thousands of terms, in an order that depends on the shape of the batch."""
CONFIDENCE_TOLERANCE = 2e-3
"""Confidences are rounded to 4 digits, which such differences may turn over."""


class Scores(NamedTuple):
    log_probs: np.ndarray
    """[frames, labels + 1] float32, the real frames alone."""
    result: dict[str, Any]


def padded(rows: Sequence[np.ndarray], num_samples: int) -> dict[str, np.ndarray]:
    """SIGNAL [rows, num_samples] with rubbish behind the clips: loud noise, and a NaN wherever there is room."""
    signal = np.random.default_rng(7).normal(0, 0.5, (len(rows), num_samples)).astype(np.float32)
    signal[:, -1] = np.nan
    for target, row in zip(signal, rows, strict=True):
        target[: len(row)] = row
    return {"SIGNAL": signal, "SIGNAL_LENGTH": np.array([[len(row)] for row in rows], np.int32)}


def score(models, request: dict[str, np.ndarray]) -> list[Scores]:
    """Sends the rows of one request through the stages, and through the ensemble of them."""
    features = models.infer(f"{MODEL}_features", **request)
    scores = models.infer(f"{MODEL}_acoustic", **features)
    texts = models.infer(f"{MODEL}_pcm", **request)["RESULT"][:, 0]
    return [
        Scores(log_probs[:length], json.loads(text))
        for log_probs, (length,), text in zip(scores["LOG_PROBS"], scores["LOG_PROB_LENGTH"], texts, strict=True)
    ]


def assert_same(scores: Scores, alone: Scores) -> None:
    assert scores.log_probs.shape == alone.log_probs.shape
    np.testing.assert_allclose(scores.log_probs, alone.log_probs, rtol=0, atol=LOG_PROB_TOLERANCE)
    assert_same_result(scores.result, alone.result)


def assert_same_result(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert result["text"] == alone["text"]
    assert result["duration"] == alone["duration"]
    assert result["confidence"] == pytest.approx(alone["confidence"], abs=CONFIDENCE_TOLERANCE)
    for word, word_alone in zip(result["words"], alone["words"], strict=True):
        assert [word[key] for key in ("word", "start", "end")] == [word_alone[key] for key in ("word", "start", "end")]


@pytest.fixture(scope="module")
def rows(signals) -> list[np.ndarray]:
    """Eight clips of different lengths, 0.9 s to 5.2 s."""
    speech = list(signals.values())
    return [*speech, speech[0][:15_000], speech[1][20_000:]]


@pytest.fixture(scope="module")
def alone(models, rows) -> list[Scores]:
    """Each clip in a request of its own, without padding."""
    return [score(models, padded([row], len(row)))[0] for row in rows]


@pytest.fixture(scope="module", autouse=True)
def _speech_is_heard(alone):
    """Equal texts prove something only where there is text."""
    assert all(scores.result["text"] for scores in alone)


@pytest.mark.parametrize("batch_size", range(1, 9))
def test_a_clip_says_the_same_in_a_batch(models, rows, alone, batch_size):
    batch = rows[-batch_size:]
    request = padded(batch, max(map(len, batch)) + 1 + 77 * batch_size)
    for scores, expected in zip(score(models, request), alone[-batch_size:], strict=True):
        assert_same(scores, expected)


@pytest.mark.parametrize("num_padding", [0, 1, 159, 160, 8_000, None])
def test_a_clip_says_the_same_whatever_the_length_of_its_tensor(models, rows, alone, num_padding):
    row = rows[2]
    num_samples = LIMIT_SAMPLES if num_padding is None else len(row) + num_padding
    (scores,) = score(models, padded([row], num_samples))
    assert_same(scores, alone[2])


def test_a_clip_is_scored_the_same_beside_clips_of_other_requests(models, batch_sizes_of, rows, alone):
    """Requests of different lengths meet in the acoustic stage's batches."""
    minute = np.resize(rows[0], LIMIT_SAMPLES)  # comes first, so that the others meet while they wait for it
    clips = [models.infer(f"{MODEL}_features", **padded([row], len(row))) for row in [minute, *rows]]
    requests = clips[:1] + clips[1:] * 4
    answers = []

    def send():
        answers.extend(models.infer_at_once(f"{MODEL}_acoustic", requests))

    assert max(batch_sizes_of(f"{MODEL}_acoustic", len(requests), send)) > 1
    for answer, expected in zip(answers[1:], alone * 4, strict=True):
        num_frames = answer["LOG_PROB_LENGTH"].item()
        assert num_frames == len(expected.log_probs)
        log_probs = answer["LOG_PROBS"][0, :num_frames]
        np.testing.assert_allclose(log_probs, expected.log_probs, rtol=0, atol=LOG_PROB_TOLERANCE)


def test_a_file_says_the_same_beside_files_of_other_requests(batch_sizes_of, sdk, clip_files, alone):
    files = [file.tobytes() for file in clip_files.values()] * 5
    outcomes = []

    def send():
        outcomes.extend(sdk.transcribe_many(files, concurrency=len(files)))

    assert max(batch_sizes_of(f"{MODEL}_acoustic", len(files), send)) > 1
    for outcome, expected in zip(outcomes, alone[: len(clip_files)] * 5, strict=True):
        assert isinstance(outcome, Transcript)
        assert_same_result(dict(outcome.raw), expected.result)


def test_a_file_says_the_same_as_its_samples(models, clip_files, alone):
    for file, expected in zip(clip_files.values(), alone, strict=False):
        answer = models.infer(MODEL, AUDIO=file)
        assert_same_result(json.loads(answer["RESULT"].item()), expected.result)


def test_a_flac_file_says_the_same_as_the_samples_that_went_into_it(models, encode, rows):
    samples = np.round(rows[1] * 2**15) / 2**15  # what 16 bits hold
    (expected,) = score(models, padded([samples.astype(np.float32)], len(samples)))
    answer = models.infer(MODEL, AUDIO=encode(samples, container="FLAC"))
    assert_same_result(json.loads(answer["RESULT"].item()), expected.result)
