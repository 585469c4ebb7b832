"""Two ways to hear the same clips, compared in pairs: what differs from clip to clip cancels out."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

DRAWS = 10_000

Counts: TypeAlias = Sequence[int] | npt.NDArray[np.floating[Any]]


def compare(words: Counts, before: Counts, after: Counts) -> dict[str, float]:
    """The difference of two word error rates, and its 95 % interval by bootstrap over clips.

    Args:
        words: of each clip.
        before: wrong ones of them, in one way.
        after: in the other way; the difference is negative where this one is better.
    """
    said, change = np.array(words), np.array(after) - np.array(before)
    drawn = np.random.default_rng(0).integers(0, len(said), (DRAWS, len(said)))
    low, high = np.percentile(change[drawn].sum(1) / said[drawn].sum(1).clip(min=1), [2.5, 97.5])
    return {"difference": float(change.sum() / said.sum()), "low": float(low), "high": float(high)}
