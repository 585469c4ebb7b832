"""Greedy CTC decoding, batch-vectorised. Needs numpy alone."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .hypothesis import Hypothesis, geometric_mean, make_words, mean_confidence


def greedy(
    log_probs: npt.NDArray[np.float32], lengths: npt.NDArray[Any], labels: list[str], frame_s: float
) -> list[Hypothesis]:
    """Take the likeliest label of each frame, collapse repeats, drop blanks.

    Args:
        log_probs: [batch, frames, len(labels) + 1] float32; the last label is the blank.
        lengths: [batch] integers, real frames of each row, at most `frames`.
        labels: one character each; a space separates words.
        frame_s: seconds per frame.
    """
    blank = len(labels)
    num_rows, num_frames, _ = log_probs.shape
    best = log_probs.argmax(axis=2)  # [B, T]
    score = np.take_along_axis(log_probs, best[..., None], axis=2)[..., 0]  # [B, T]
    real = np.arange(num_frames) < np.asarray(lengths).reshape(-1, 1)
    best = np.where(real, best, blank)
    changes = np.ones_like(real)
    changes[:, 1:] = best[:, 1:] != best[:, :-1]

    # A run is a maximal stretch of equal labels. Runs of all rows lie in one flat list, in order.
    starts = np.flatnonzero(changes)
    ends = np.append(starts[1:], best.size)
    run_labels = best.ravel()[starts]
    run_scores = np.maximum.reduceat(score.ravel(), starts) if starts.size else score.ravel()
    rows = starts // max(num_frames, 1)
    emitted = np.flatnonzero(run_labels != blank)
    clips, first_frames = rows[emitted], rows[emitted] * num_frames
    text = "".join([labels[i] for i in run_labels[emitted].tolist()])
    begin, end = starts[emitted] - first_frames, ends[emitted] - first_frames
    words, places = make_words(text, begin, end, run_scores[emitted], frame_s, clips)
    bounds = np.searchsorted(clips[places], np.arange(num_rows + 1)).tolist()
    hypotheses = []
    for row in range(num_rows):
        mine = tuple(words[bounds[row] : bounds[row + 1]])
        confidence = mean_confidence(mine) if mine else geometric_mean(score[row][real[row]])
        hypotheses.append(Hypothesis(" ".join([word.word for word in mine]), mine, confidence))
    return hypotheses
