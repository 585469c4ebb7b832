"""The results of a decoder: hypotheses with words and alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .calibration import Calibration


class Word(NamedTuple):
    """One word of a hypothesis, with its times in seconds from the start of the clip."""

    word: str
    start: float
    end: float
    confidence: float
    """The confidence in the word, in [0, 1]: the probability of its least certain character, at that character's most
    certain frame. If the recogniser is calibrated, the probability that the word is right."""


_make_word = partial(tuple.__new__, Word)  # three times as fast as Word(...); a batch has thousands


@dataclass(frozen=True)
class Alternative:
    """One reading of a clip, with its scores as natural logarithms."""

    text: str
    score: float
    """The sum of the scores below, by which readings are ordered."""
    acoustic: float
    """The log-probability of the text given the audio, over all alignments that were kept; an estimate if the reading
    was recombined with a better one."""
    language: float
    """The weighted language model score and the word scores; 0 without a language model."""
    hotwords: float
    """The boosts of the hot words in the reading."""
    neural: float = 0.0
    """The weighted neural language model score; 0 without rescoring."""


@dataclass(frozen=True)
class Hypothesis:
    """The decoded text of one clip, with words, confidence and alternatives."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    """The mean of the words' confidences, in [0, 1]: the share of words to expect right. For an empty text, the
    geometric mean of the blanks' probabilities."""
    alternatives: tuple[Alternative, ...] = ()
    """The readings, the best first, which is `text`; empty for greedy decoding."""


def make_words(
    text: str,
    begin: npt.NDArray[np.integer[Any]],
    end: npt.NDArray[np.integer[Any]],
    scores: npt.NDArray[np.floating[Any]],
    frame_s: float,
    calibration: Calibration,
    decoder: str,
    num_frames: Sequence[int],
    clips: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[list[Word], npt.NDArray[np.intp]]:
    """Cut characters into words at spaces and at the ends of clips.

    Args:
        text: the characters of one or more clips, in order.
        begin: [characters] the first frame of each character.
        end: [characters] the frame after each character's last one.
        scores: [characters] the log-probability of each character at its most certain frame.
        frame_s: seconds per frame.
        calibration: corrections of times and confidences.
        decoder: the decoder that gave the text, for the calibration of confidences.
        num_frames: the length of each clip in frames.
        clips: [characters] the number of each character's clip, not decreasing; None for one clip.

    Returns:
        The words, and the position in `text` of each word's first character.
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
    places = clips[first] if clips is not None else np.zeros(len(first), np.int64)
    is_first = np.ones(len(first), np.bool_)
    is_first[1:] = places[1:] != places[:-1]
    starts, ends, clip_ends = (
        np.rint(frames * (1e3 * frame_s)).astype(np.int64)
        for frames in (begin[first], end[after - 1], np.array(num_frames)[places])
    )
    starts, ends = calibration.correct_times(starts, ends, round(1e3 * frame_s), is_first, clip_ends)
    least = np.minimum(np.minimum.reduceat(np.where(is_letter, scores, 0.0), first), 0.0)  # rounding may exceed 0
    confidences = calibration.likelihoods(np.exp(least.astype(np.float64)), decoder).round(4)
    spelled = [text[i:j] for i, j in zip(first.tolist(), after.tolist(), strict=True)]
    rows = zip(spelled, (starts / 1e3).tolist(), (ends / 1e3).tolist(), confidences.tolist(), strict=True)
    return list(map(_make_word, rows)), first


def mean_confidence(words: Sequence[Word]) -> float:
    """Return the mean confidence of at least one word, rounded to four digits."""
    total: float = sum(map(attrgetter("confidence"), words))
    return round(total / len(words), 4)


def geometric_mean(log_probabilities: npt.NDArray[np.floating[Any]]) -> float:
    """Return the geometric mean of probabilities, rounded to four digits; 0 if there are none."""
    return round(float(np.exp(min(log_probabilities.mean(), 0.0))), 4) if log_probabilities.size else 0.0
