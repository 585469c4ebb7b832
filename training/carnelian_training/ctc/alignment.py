"""Forced alignment: find where in a clip each character of a text is, and how probable it is there."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .calibration import Calibration
from .hypothesis import Alternative, Hypothesis, geometric_mean, make_words, mean_confidence

Frames = npt.NDArray[np.int64]
MARGIN = 200.0
"""The natural-log distance below the best state up to which states are followed: about forty characters that the
recogniser considers very improbable. With it, time and memory grow with a clip's length, not with its square."""

LOOK_EVERY = 16
"""The number of frames after which the states to follow are chosen again."""


def least_frames(text: str) -> int:
    """Return the least number of frames that CTC needs for a text: one per character, and one between equal ones."""
    return len(text) + sum(first == second for first, second in pairwise(text))


def align(log_probs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], space: int) -> tuple[Frames, Frames]:
    """Find the most probable alignment of a text with the Viterbi algorithm.

    The search is limited to :data:`MARGIN`; if no alignment lies within it, it is repeated without the limit.

    Args:
        log_probs: [frames, labels + 1] float32; the last label is the blank.
        labels: [characters] int64, at least one; there must be frames enough for them.
        space: the label of the space; extra spaces before and after the text and beside its spaces are allowed.

    Returns:
        The first frame of each character, and the frame after its last one, [characters] int64 each.
    """
    blank = log_probs.shape[1] - 1
    states = np.full(2 * len(labels) + 1, blank)  # a blank before, between and after the characters
    states[1::2] = labels
    beside = np.concatenate(([True], labels == space)) | np.concatenate((labels == space, [True]))
    states[::2][beside] = blank + 1  # these may be a blank or a space
    either = np.maximum(log_probs[:, [blank]], log_probs[:, [space]])
    emitted = np.concatenate((log_probs, either), axis=1).astype(np.float64)
    # The blank between different characters may be skipped.
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
    """Find the most probable path through the states to the last two; None if a finite `margin` excludes them.

    Args:
        emitted: [frames, symbols] log-probabilities.
        states: [states] the symbol of each state.
        skips: [states] the log-probability of coming from two states before; -inf: not allowed.
        margin: distance below a frame's best state up to which states are followed.

    Returns:
        [frames] the state in each frame, never decreasing.
    """
    scores = np.full((3, len(states)), -np.inf)  # by the last move: stay, from one state before, from two before
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
    """Make a hypothesis of the readings, with times and confidences of the words of the best one.

    Args:
        log_probs: [frames, len(labels) + 1] float32; the last label is the blank.
        readings: at least one, the best first.
        labels: one character each.
        frame_s: seconds per frame.
        calibration: corrections of times and confidences.
        decoder: the decoder that gave the readings.
    """
    text = readings[0].text
    if not text:
        return Hypothesis("", (), geometric_mean(log_probs[:, -1]), tuple(readings))
    numbers = {label: i for i, label in enumerate(labels)}
    codes = np.array([numbers[character] for character in text])
    begin, end = align(log_probs, codes, numbers[" "])
    scores = np.array([log_probs[b:e, code].max() for b, e, code in zip(begin, end, codes, strict=True)])
    words, _ = make_words(text, begin, end, scores, frame_s, calibration, decoder, [len(log_probs)])
    return Hypothesis(text, tuple(words), mean_confidence(words), tuple(readings))
