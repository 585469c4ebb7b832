"""Greedy CTC decoding, of all clips of a batch at once. Needs numpy alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .calibration import Calibration
from .hypothesis import Hypothesis, geometric_mean, make_words, mean_confidence

LOG_HALF = -0.69
"""Just above ln 0.5: a blank with more than that is the likeliest label of its frame, and need not be compared."""


def greedy(
    clips: Sequence[npt.NDArray[np.float32]], labels: Sequence[str], frame_s: float, calibration: Calibration
) -> list[Hypothesis]:
    """Take the likeliest label of each frame, collapse repeats, drop blanks.

    Args:
        clips: [frames, len(labels) + 1] float32 each, log-probabilities; the last label is the blank.
        labels: one character each; a space separates words.
        frame_s: seconds per frame.
        calibration: of times and confidences.
    """
    if not clips:
        return []
    blank = len(labels)
    # Frames of all clips lie in one list, in order. Most are blanks beyond doubt; the others are looked at.
    unsure = [(clip[:, blank] < LOG_HALF).nonzero()[0] for clip in clips]
    scores = np.concatenate([clip.take(frames, axis=0) for clip, frames in zip(clips, unsure, strict=True)])
    frames = np.concatenate(unsure)
    places = np.repeat(np.arange(len(clips)), [len(found) for found in unsure])  # each frame's clip
    best = scores.argmax(axis=1)
    likely = (best != blank).nonzero()[0]
    best, frames, places, scores = best[likely], frames[likely], places[likely], scores[likely, best[likely]]

    # A run is a stretch of equal labels in frames that follow one another.
    is_first = np.ones(len(best), np.bool_)
    is_first[1:] = (best[1:] != best[:-1]) | (frames[1:] != frames[:-1] + 1) | (places[1:] != places[:-1])
    is_last = np.ones(len(best), np.bool_)
    is_last[:-1] = is_first[1:]
    first, last = is_first.nonzero()[0], is_last.nonzero()[0]
    peaks = np.maximum.reduceat(scores, first) if first.size else scores
    characters = np.frombuffer("".join(labels).encode("utf-32-le"), np.uint32)
    text = characters[best[first]].tobytes().decode("utf-32-le")
    words, runs = make_words(
        text, frames[first], frames[last] + 1, peaks, frame_s, calibration, "greedy", places[first]
    )
    bounds = np.searchsorted(places[first[runs]], np.arange(len(clips) + 1)).tolist()
    hypotheses = []
    for place, clip in enumerate(clips):
        mine = tuple(words[bounds[place] : bounds[place + 1]])
        confidence = mean_confidence(mine) if mine else geometric_mean(clip[:, blank])
        hypotheses.append(Hypothesis(" ".join([word.word for word in mine]), mine, confidence))
    return hypotheses
