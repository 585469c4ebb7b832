"""Batches in parts that stay in a CPU's caches. A GPU runs whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_RUN_ELEMENTS = 2**17
"""Of a ragged input, in one run: 20 s of log-mel features. Beyond, the activations of deep networks leave the caches,
and each clip costs up to a third more than alone."""


def split(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive ones with at most :data:`MAX_RUN_ELEMENTS` together; a larger one is by itself."""
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > MAX_RUN_ELEMENTS:
            yield slice(start, position)
            start, total = position, 0
        total += size
    yield slice(start, len(sizes))
