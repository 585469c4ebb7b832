"""Cuts batches into parts that suit a CPU's caches. Instances on a GPU run whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_RUN_ELEMENTS = 2**17
"""The most elements of an ONNX model's ragged input in one run: 20 s of log-mel features. With more, the activations of
deep networks leave the caches, and each clip costs up to a third more than alone."""
MAX_RUN_ROWS = 4
"""The most rows in one run of a DALI pipeline, unless it has more threads. Its operators keep a buffer for each place
in a batch, as large as the longest clip that ever had that place. On one thread, a row takes no longer in a run of four
than in one of 32, because the buffers stay in the caches."""


def split(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut a sequence of sizes into slices whose sums are at most `most`; a size above that is a slice by itself."""
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > most:
            yield slice(start, position)
            start, total = position, 0
        total += size
    yield slice(start, len(sizes))
