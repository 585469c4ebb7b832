"""Forced alignment: where in the clip the characters of a text are, and what the recogniser thinks of them there."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .calibration import Calibration
from .hypothesis import Alternative, Hypothesis, geometric_mean, make_words, mean_confidence

Frames = npt.NDArray[np.int64]


def least_frames(text: str) -> int:
    """Frames that CTC needs for a text: one for each character, and one for the blank between equal ones."""
    return len(text) + sum(first == second for first, second in pairwise(text))


def align(log_probs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], space: int) -> tuple[Frames, Frames]:
    """Find the likeliest alignment of a text, by Viterbi's algorithm.

    Args:
        log_probs: [frames, labels + 1] float32; the last label is the blank.
        labels: [characters] int64, at least one; there must be frames enough for them.
        space: the label that may come before and after the text, and repeatedly within it, and changes nothing there.

    Returns:
        First frame of each character and the frame after its last, [characters] int64.
    """
    blank = log_probs.shape[1] - 1
    states = np.full(2 * len(labels) + 1, blank)  # a blank before, between and after the characters
    states[1::2] = labels
    # A blank may be left out between different characters.
    skips = np.full(len(states), -np.inf)
    skips[3::2] = np.where(labels[1:] != labels[:-1], 0.0, -np.inf)
    emitted = log_probs[:, states].astype(np.float64)  # [frames, states]
    beside = np.concatenate(([True], labels == space)) | np.concatenate((labels == space, [True]))
    free = 2 * beside.nonzero()[0]  # blanks that may be spaces as well
    emitted[:, free] = np.maximum(emitted[:, free], log_probs[:, [space]])
    steps = np.zeros(emitted.shape, np.int8)
    scores = np.full((3, len(states)), -np.inf)  # having stayed, come from the state before, or from two before
    scores[0, :2] = emitted[0, :2]
    for frame in range(1, len(emitted)):
        scores[1, 1:] = scores[0, :-1]
        scores[2, 2:] = scores[0, :-2] + skips[2:]
        steps[frame] = scores.argmax(axis=0)
        scores[0] = scores.max(axis=0) + emitted[frame]
    state = len(states) - (1 if scores[0, -1] >= scores[0, -2] else 2)
    path = np.empty(len(emitted), np.int64)
    for frame in range(len(emitted) - 1, -1, -1):
        path[frame] = state
        state -= int(steps[frame, state])
    characters = 2 * np.arange(len(labels)) + 1
    return np.searchsorted(path, characters), np.searchsorted(path, characters, side="right")


def time_words(
    log_probs: npt.NDArray[np.float32],
    readings: Sequence[Alternative],
    labels: Sequence[str],
    frame_s: float,
    calibration: Calibration,
    decoder: str,
) -> Hypothesis:
    """Time the words of the best reading, and rate how sure the recogniser is of them.

    Args:
        log_probs: [frames, len(labels) + 1] float32; the last label is the blank.
        readings: the best first, at least one.
        labels: one character each.
        frame_s: seconds per frame.
        calibration: of times and confidences.
        decoder: what gave the readings.
    """
    text = readings[0].text
    if not text:
        return Hypothesis("", (), geometric_mean(log_probs[:, -1]), tuple(readings))
    numbers = {label: i for i, label in enumerate(labels)}
    codes = np.array([numbers[character] for character in text])
    begin, end = align(log_probs, codes, numbers[" "])
    scores = np.array([log_probs[b:e, code].max() for b, e, code in zip(begin, end, codes, strict=True)])
    words, _ = make_words(text, begin, end, scores, frame_s, calibration, decoder)
    return Hypothesis(text, tuple(words), mean_confidence(words), tuple(readings))
