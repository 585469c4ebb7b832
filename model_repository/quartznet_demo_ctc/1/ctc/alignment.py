"""Forced alignment: where in the clip the characters of a text are, and what the recogniser thinks of them there."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .calibration import Calibration
from .hypothesis import Alternative, Hypothesis, geometric_mean, make_words, mean_confidence

Frames = npt.NDArray[np.int64]
MARGIN = 200.0
"""How far below the best state others are followed: some forty characters that the recogniser does not believe in. So
what a long clip takes grows with its length, not with the square of it."""

LOOK_EVERY = 16
"""Frames between two looks at which states are followed."""


def least_frames(text: str) -> int:
    """Frames that CTC needs for a text: one for each character, and one for the blank between equal ones."""
    return len(text) + sum(first == second for first, second in pairwise(text))


def align(log_probs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], space: int) -> tuple[Frames, Frames]:
    """Find the likeliest alignment of a text, by Viterbi's algorithm, within :data:`MARGIN` as long as it ends there.

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
    beside = np.concatenate(([True], labels == space)) | np.concatenate((labels == space, [True]))
    states[::2][beside] = blank + 1  # blanks that may be spaces as well
    either = np.maximum(log_probs[:, [blank]], log_probs[:, [space]])
    emitted = np.concatenate((log_probs, either), axis=1).astype(np.float64)
    # A blank may be left out between different characters.
    skips = np.full(len(states), -np.inf)
    skips[3::2] = np.where(labels[1:] != labels[:-1], 0.0, -np.inf)
    path = _viterbi(emitted, states, skips, MARGIN)
    if path is None:
        path = _viterbi(emitted, states, skips, np.inf)
    assert path is not None
    characters = 2 * np.arange(len(labels)) + 1
    return np.searchsorted(path, characters), np.searchsorted(path, characters, side="right")


def _viterbi(
    emitted: npt.NDArray[np.float64], states: Frames, skips: npt.NDArray[np.float64], margin: float
) -> Frames | None:
    """Find the likeliest path through all states; None if the margin is finite and its end lies beyond.

    Args:
        emitted: [frames, symbols] log-probabilities.
        states: [states] the symbol of each.
        skips: [states] what coming from two before adds.
        margin: how far below a frame's best state others are followed.

    Returns:
        [frames] the state in each, never falling.
    """
    scores = np.full((3, len(states)), -np.inf)  # having stayed, come from the state before, or from two before
    scores[0, :2] = emitted[0, states[:2]]
    low, high = 0, 2
    steps = [(0, np.zeros(2, np.int8))]
    for frame, row in enumerate(emitted[1:], start=1):
        high = min(high + 2, len(states))
        scores[1, low + 1 : high] = scores[0, low : high - 1]
        np.add(scores[0, low : high - 2], skips[low + 2 : high], out=scores[2, low + 2 : high])
        reached = scores[:, low:high]
        steps.append((low, reached.argmax(axis=0).astype(np.int8)))
        reached[0] = reached.max(axis=0) + row[states[low:high]]
        if frame % LOOK_EVERY == 0:
            followed = (reached[0] >= reached[0].max() - margin).nonzero()[0]
            left, low, high = high, low + int(followed[0]), low + int(followed[-1]) + 1
            scores[0, high:left], scores[1:, low : low + 2] = -np.inf, -np.inf
    if scores[0, -2:].max() == -np.inf and margin < np.inf:
        return None
    state = len(states) - (1 if scores[0, -1] >= scores[0, -2] else 2)
    path = np.empty(len(emitted), np.int64)
    for frame in range(len(emitted) - 1, -1, -1):
        path[frame] = state
        first, taken = steps[frame]
        state -= int(taken[state - first])
    return path


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
