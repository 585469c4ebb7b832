"""Greedy CTC decoding, batch-vectorised: log-probabilities to text, words with times, confidence. Needs numpy alone.

`carnelian-export` copies this file, as it is, into ``<model>_ctc``: offline evaluation and the server decode with the
same code.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Word:
    """One word of a hypothesis; times in seconds from the start of the clip."""

    word: str
    start: float
    end: float
    confidence: float
    """Geometric mean of the probabilities of its characters, each at its most certain frame; in [0, 1]."""


@dataclass(frozen=True)
class Hypothesis:
    """What one clip says."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    """Geometric mean over all characters, spaces included; of an empty text, of the blanks. In [0, 1]."""


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
    emitted = run_labels != blank
    hypotheses = []
    for row in range(num_rows):
        runs = np.flatnonzero(emitted & (rows == row))
        if not runs.size:
            frames = score[row][real[row]]
            hypotheses.append(Hypothesis("", (), _geometric_mean(frames)))
            continue
        characters = [labels[i] for i in run_labels[runs]]
        begin, end = starts[runs] - row * num_frames, ends[runs] - row * num_frames
        words = _words(characters, begin, end, run_scores[runs], frame_s)
        hypotheses.append(Hypothesis(" ".join(w.word for w in words), words, _geometric_mean(run_scores[runs])))
    return hypotheses


def _words(
    characters: list[str],
    begin: npt.NDArray[np.intp],
    end: npt.NDArray[np.intp],
    scores: npt.NDArray[np.float32],
    frame_s: float,
) -> tuple[Word, ...]:
    words, first = [], 0
    for i in range(len(characters) + 1):
        if i < len(characters) and characters[i] != " ":
            continue
        if i > first:
            words.append(
                Word(
                    "".join(characters[first:i]),
                    round(float(begin[first]) * frame_s, 3),
                    round(float(end[i - 1]) * frame_s, 3),
                    _geometric_mean(scores[first:i]),
                )
            )
        first = i + 1
    return tuple(words)


def _geometric_mean(log_probabilities: npt.NDArray[np.float32]) -> float:
    return round(float(np.exp(log_probabilities.mean())), 4) if log_probabilities.size else 0.0
