"""Batches in parts, on a CPU. An instance on a GPU runs whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_RUN_ELEMENTS = 2**17
"""Of an ONNX model's ragged input, in one run: 20 s of log-mel features. Beyond, the activations of deep networks leave
the caches, and each clip costs up to a third more than alone."""
MAX_RUN_ROWS = 4
"""Of a DALI pipeline, in one run; more only if it has more threads. Its operators keep a buffer for each place in a
batch, as large as the longest clip that ever had that place. On one thread, four rows take as long or less, each, than
32 do: the buffers stay in the caches."""


def split(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut a sequence of sizes into slices whose sums are at most `most`; a size above that is a slice by itself."""
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > most:
            yield slice(start, position)
            start, total = position, 0
        total += size
    yield slice(start, len(sizes))
