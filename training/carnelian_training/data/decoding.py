"""Decoding of clips by DALI: its operators, and pipelines that go on without the clips that cannot be decoded."""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as graph_math
from nvidia.dali.pipeline import DataNode, Pipeline

from carnelian_training.data.audio import Encoded, encoded, error_words, to_wav
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.data.resampling import resample
from carnelian_training.features import SAMPLE_RATE_HZ

DALI_ERRORS = (RuntimeError, ValueError, MemoryError)
"""The errors of a DALI pipeline: too little memory is a MemoryError, an absurd size a ValueError."""
READING_ERRORS = (OSError, *DALI_ERRORS)
"""The errors by which a clip cannot be read or decoded."""
RINGING = 160
"""The number of samples, 10 ms, at either end of a clip where a resampled constant offset causes ringing."""
STAND_IN = to_wav(np.zeros((1, 1), np.float32), SAMPLE_RATE_HZ)
"""A WAV file with one sample of silence, which replaces a clip that cannot be decoded."""


def decode(data: DataNode, rate_hz: Any) -> tuple[DataNode, DataNode]:
    """Add decoding to a DALI graph with conditionals: encoded bytes of any rate and channels -> mono at `rate_hz`.

    Returns:
        The signal, [samples or 1] float32, for other operators need one sample; and the number of samples, int64.
    """
    signal, recorded_hz = fn.decoders.audio(data, dtype=types.FLOAT, downmix=True)
    signal = resample(signal, recorded_hz, rate_hz)
    return fn.pad(signal, axes=[0], shape=[1]), signal.shape(dtype=types.INT64)[0]


def level(signal: DataNode) -> DataNode:
    """Add a signal's level to a DALI graph: its root mean square without its constant offset.

    :data:`RINGING` samples at either end (of a short signal, 1/50 of its length) are left out.
    """
    size = signal.shape(dtype=types.INT32)
    edge = graph_math.min(size // 50, RINGING)
    inner = fn.slice(signal, start=edge, shape=size - 2 * edge, axes=[0])
    return fn.reductions.std_dev(inner, fn.reductions.mean(inner))


def run_surviving(
    batches: Sequence[Sequence[Item]],
    failed: dict[Clip, str],
    build: Callable[[Iterator[Sequence[Item]]], Pipeline],
) -> Iterator[tuple[Sequence[Item], tuple[Any, ...]]]:
    """Run a DALI pipeline over batches; if a file cannot be decoded, go on with a new pipeline without that clip.

    Args:
        batches: lists of items; an empty one does not run the pipeline.
        failed: clips that cannot be decoded are added, with the reason.
        build: makes a pipeline for the remaining batches, without empty ones; it must read clips through
            :func:`read_batch`.

    Yields:
        Each batch with the pipeline's outputs; rows of clips in `failed` are meaningless.
    """
    done = 0
    while done < len(batches):
        # Each damaged file leads here, so the rest of the epoch is not gone through.
        pipeline = build(filter(None, islice(batches, done, None)))
        for items in islice(batches, done, None):
            outputs: tuple[Any, ...] = ()
            if items:
                try:
                    outputs = pipeline.run()
                except DALI_ERRORS as error:
                    # The pipeline cannot be used any more. A new one starts from this batch, without the bad clips.
                    _blame(items, failed, error)
                    break
            done += 1
            yield items, outputs


def read_batch(items: Sequence[Item], failed: dict[Clip, str], num_threads: int) -> list[Encoded]:
    """Return the encoded clips of a batch, as :func:`read_clip` does each; `num_threads` files are read at once.

    A file system on a network takes milliseconds to answer, for each file anew.
    """
    return list(pool(num_threads).map(lambda item: read_clip(item.clip, failed), items))


@functools.cache  # a pipeline's own would never be freed: DALI's operator and its function refer to each other
def pool(num_threads: int) -> ThreadPoolExecutor:
    """Return the threads for what Python does with the clips of a batch.

    DALI has one for Python, which disturbs 2,000 s of audio a second: too slow.
    """
    return ThreadPoolExecutor(num_threads)


def read_clip(clip: Clip, failed: dict[Clip, str]) -> Encoded:
    """Return the encoded clip, or :data:`STAND_IN` if it is in `failed` or cannot be read; then add it to `failed`."""
    if clip not in failed:
        try:
            return encoded(clip)
        except READING_ERRORS as error:
            failed[clip] = error_words(error)
    return STAND_IN


def _blame(items: Sequence[Item], failed: dict[Clip, str], error: Exception) -> None:
    """Decode the clips one by one and add those that fail to `failed`.

    Raises:
        Exception: `error`, if every clip can be decoded.
    """
    found = {clip: why for clip in {item.clip for item in items} - failed.keys() if (why := _decoding_error(clip))}
    if not found:
        raise error
    failed |= found


def _decoding_error(clip: Clip) -> str | None:
    """Return why a clip cannot be decoded, as the message of the file system or of DALI; None if it can."""

    def read() -> list[Encoded]:  # not within `graph`: DALI rewrites what is called there
        return [encoded(clip)]

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)
    def graph() -> tuple[DataNode, ...]:
        data = fn.external_source(source=read, dtype=types.UINT8, ndim=1)
        return decode(data, float(SAMPLE_RATE_HZ))

    try:
        pipeline = graph()
        pipeline.build()
        pipeline.run()
    except READING_ERRORS as error:
        return error_words(error)
    return None
