"""Greedy CTC decoding of all clips of a batch at once. Needs only numpy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .calibration import Calibration
from .hypothesis import Hypothesis, geometric_mean, make_words, mean_confidence

LOG_HALF = -0.69
"""A threshold just above ln 0.5: a blank above it is the most probable label of its frame without any comparison."""


def greedy(
    clips: Sequence[npt.NDArray[np.float32]], labels: Sequence[str], frame_s: float, calibration: Calibration
) -> list[Hypothesis]:
    """Take the most probable label of each frame, merge repeats, and drop blanks.

    Args:
        clips: log-probabilities of each clip, [frames, len(labels) + 1] float32; the last label is the blank.
        labels: one character each; a space separates words.
        frame_s: seconds per frame.
        calibration: corrections of times and confidences.

    Returns:
        One hypothesis per clip.
    """
    if not clips:
        return []
    blank = len(labels)
    # The frames of all clips form one list, in order. Most are clearly blanks; only the others are compared.
    unsure = [(clip[:, blank] < LOG_HALF).nonzero()[0] for clip in clips]
    scores = np.concatenate([clip.take(frames, axis=0) for clip, frames in zip(clips, unsure, strict=True)])
    frames = np.concatenate(unsure)
    places = np.repeat(np.arange(len(clips)), [len(found) for found in unsure])  # each frame's clip
    best = scores.argmax(axis=1)
    likely = (best != blank).nonzero()[0]
    best, frames, places, scores = best[likely], frames[likely], places[likely], scores[likely, best[likely]]

    # A run is a series of equal labels in consecutive frames of one clip.
    is_first = np.ones(len(best), np.bool_)
    is_first[1:] = (best[1:] != best[:-1]) | (frames[1:] != frames[:-1] + 1) | (places[1:] != places[:-1])
    is_last = np.ones(len(best), np.bool_)
    is_last[:-1] = is_first[1:]
    first, last = is_first.nonzero()[0], is_last.nonzero()[0]
    peaks = np.maximum.reduceat(scores, first) if first.size else scores
    characters = np.frombuffer("".join(labels).encode("utf-32-le"), np.uint32)
    text = characters[best[first]].tobytes().decode("utf-32-le")
    begin, end, lengths = frames[first], frames[last] + 1, list(map(len, clips))
    words, runs = make_words(text, begin, end, peaks, frame_s, calibration, "greedy", lengths, places[first])
    bounds = np.searchsorted(places[first[runs]], np.arange(len(clips) + 1)).tolist()
    hypotheses = []
    for place, clip in enumerate(clips):
        mine = tuple(words[bounds[place] : bounds[place + 1]])
        confidence = mean_confidence(mine) if mine else geometric_mean(clip[:, blank])
        hypotheses.append(Hypothesis(" ".join([word.word for word in mine]), mine, confidence))
    return hypotheses
