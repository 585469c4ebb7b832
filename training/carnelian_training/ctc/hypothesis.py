"""What a decoder returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .calibration import Calibration


class Word(NamedTuple):
    """One word of a hypothesis; times in seconds from the start of the clip."""

    word: str
    start: float
    end: float
    confidence: float
    """Probability of its least certain character, at that one's most certain frame; where the recogniser is calibrated,
    the probability that the word is right. In [0, 1]."""


_make_word = partial(tuple.__new__, Word)  # a third of the time of Word(...), and there are thousands in a batch


@dataclass(frozen=True)
class Alternative:
    """One reading of a clip, with natural logarithms of what speaks for it."""

    text: str
    score: float
    """What the readings are ordered by: the sum of those below."""
    acoustic: float
    """Of the probability of the text given the audio, over all alignments that were kept; an estimate, where the search
    went on with a better reading only."""
    language: float
    """Weighted language model score and word scores; 0 without either."""
    hotwords: float
    """Boosts of the hot words in it."""
    neural: float = 0.0
    """Weighted neural language model score; 0 without rescoring."""


@dataclass(frozen=True)
class Hypothesis:
    """What one clip says."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    """Mean of the words': the share to expect right. Of an empty text, geometric mean of the blanks. In [0, 1]."""
    alternatives: tuple[Alternative, ...] = ()
    """The best first, which is `text`; none by greedy decoding."""


def make_words(
    text: str,
    begin: npt.NDArray[np.integer[Any]],
    end: npt.NDArray[np.integer[Any]],
    scores: npt.NDArray[np.floating[Any]],
    frame_s: float,
    calibration: Calibration,
    decoder: str,
    clips: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[list[Word], npt.NDArray[np.intp]]:
    """Cut characters into words at their spaces, and where a clip ends.

    Args:
        text: characters, of one or several clips, in order.
        begin: [characters] first frame of each.
        end: [characters] the frame after its last.
        scores: [characters] log-probability at its most certain frame.
        frame_s: seconds per frame.
        calibration: of times and confidences.
        decoder: what gave the text; confidences are calibrated for each.
        clips: [characters] which clip each is of; None for one clip.

    Returns:
        The words, and the place in `text` of each one's first character.
    """
    is_letter = np.frombuffer(text.encode("utf-32-le"), np.uint32) != ord(" ")
    follows = is_letter[1:] & is_letter[:-1]
    if clips is not None:
        follows &= clips[1:] == clips[:-1]
    begins, stops = is_letter.copy(), is_letter.copy()
    begins[1:] &= ~follows
    stops[:-1] &= ~follows
    first, after = begins.nonzero()[0], stops.nonzero()[0] + 1
    if not first.size:
        return [], first
    is_first = np.zeros(len(first), np.bool_)
    is_first[0] = True
    if clips is not None:
        is_first[1:] = clips[first[1:]] != clips[first[:-1]]
    starts, ends = (np.rint(frames * (1e3 * frame_s)).astype(np.int64) for frames in (begin[first], end[after - 1]))
    starts, ends = calibration.correct_times(starts, ends, round(1e3 * frame_s), is_first)
    least = np.minimum.reduceat(np.where(is_letter, scores, 0.0), first)
    confidences = calibration.likelihoods(np.exp(least.astype(np.float64)), decoder).round(4)
    spelled = [text[i:j] for i, j in zip(first.tolist(), after.tolist(), strict=True)]
    rows = zip(spelled, (starts / 1e3).tolist(), (ends / 1e3).tolist(), confidences.tolist(), strict=True)
    return list(map(_make_word, rows)), first


def mean_confidence(words: Sequence[Word]) -> float:
    """The share of words to expect right, to four digits; of at least one."""
    total: float = sum(map(attrgetter("confidence"), words))
    return round(total / len(words), 4)


def geometric_mean(log_probabilities: npt.NDArray[np.floating[Any]]) -> float:
    """A mean probability, to four digits; 0 of none."""
    return round(float(np.exp(log_probabilities.mean())), 4) if log_probabilities.size else 0.0
