"""What a decoder returns."""

from collections.abc import Sequence
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
class Alternative:
    """One reading of a clip, with natural logarithms of what speaks for it."""

    text: str
    score: float
    """What the readings are ordered by: the sum of the three below."""
    acoustic: float
    """Of the probability of the text given the audio, over all alignments that were kept."""
    language: float
    """Weighted language model score and word scores; 0 without either."""
    hotwords: float
    """Boosts of the hot words in it."""


@dataclass(frozen=True)
class Hypothesis:
    """What one clip says."""

    text: str
    words: tuple[Word, ...]
    confidence: float
    """Geometric mean over all characters, spaces included; of an empty text, of the blanks. In [0, 1]."""
    alternatives: tuple[Alternative, ...] = ()
    """The best first, which is `text`; none by greedy decoding."""


def make_words(
    characters: Sequence[str],
    begin: npt.NDArray[np.integer[Any]],
    end: npt.NDArray[np.integer[Any]],
    scores: npt.NDArray[np.floating[Any]],
    frame_s: float,
) -> tuple[Word, ...]:
    """Join characters to words at their spaces.

    Args:
        characters: of one clip, in order.
        begin: [characters] first frame of each.
        end: [characters] the frame after its last.
        scores: [characters] log-probability at its most certain frame.
        frame_s: seconds per frame.
    """
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
                    geometric_mean(scores[first:i]),
                )
            )
        first = i + 1
    return tuple(words)


def geometric_mean(log_probabilities: npt.NDArray[np.floating[Any]]) -> float:
    """A mean probability, to four digits; 0 of none."""
    return round(float(np.exp(log_probabilities.mean())), 4) if log_probabilities.size else 0.0
