"""Compare two ways to transcribe the same clips in pairs, so that differences between clips cancel out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

DRAWS = 10_000
DRAWN_AT_ONCE = 100
"""Number of bootstrap draws that are made at once: all draws of many clips would take gigabytes of memory."""

Counts: TypeAlias = Sequence[int] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two word error rates, with its 95 % interval; negative if the second way is better."""

    difference: float
    low: float
    high: float


def compare(words: Counts, before: Counts, after: Counts, speakers: Sequence[int] | None = None) -> Difference:
    """Compute the difference of two word error rates, and its 95 % interval by bootstrap.

    Args:
        words: Number of words of each clip.
        before: Number of word errors of each clip in the first way.
        after: Number of word errors of each clip in the second way.
        speakers: Speaker of each clip. The bootstrap draws speakers, each with all of its clips, because errors of one
            speaker are alike. None draws single clips.
    """
    said, change = np.array(words), np.array(after) - np.array(before)
    if speakers is not None:
        of_clip = np.unique(speakers, return_inverse=True)[1]
        said, change = np.bincount(of_clip, said), np.bincount(of_clip, change)
    rng, rates = np.random.default_rng(0), []
    for _ in range(DRAWS // DRAWN_AT_ONCE):
        drawn = rng.integers(0, len(said), (DRAWN_AT_ONCE, len(said)))
        rates.append(change[drawn].sum(1) / said[drawn].sum(1).clip(min=1))
    low, high = np.percentile(rates, [2.5, 97.5])
    return Difference(difference=float(change.sum() / said.sum()), low=float(low), high=float(high))
