"""Masks of wav2vec 2.0: spans of frames, replaced by one learnt vector, and spans of channels, which are zeroed.

Random numbers for a clip come from its own seed, so they are the same in every batch and every process.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carnelian_training.checks import check_at_least_one, check_not_negative, check_probability


@dataclass(frozen=True, kw_only=True)
class SpanMaskConfig:
    """The masks of frames and channels between the extractor and the transformer. Spans may overlap."""

    time_probability: float = 0.0
    """The probability that a frame begins a span, times `time_length`: the share of hidden frames without overlap."""
    time_length: int = 10
    """The number of frames in a span."""
    time_least: int = 2
    """The least number of spans in a clip, if `time_probability` is above 0; a short clip has fewer, or a shorter one,
    so that a frame stays visible."""
    channel_probability: float = 0.0
    """The probability that a channel begins a span, times `channel_length`: the share of zeroed channels without
    overlap."""
    channel_length: int = 64
    """The number of channels in a span."""

    def __post_init__(self) -> None:
        check_probability(self, "time_probability", "channel_probability")
        check_at_least_one(self, "time_length", "channel_length")
        check_not_negative(self, "time_least")


def time_mask(lengths: Sequence[int], frames: int, config: SpanMaskConfig, seeds: Sequence[int]) -> Tensor | None:
    """Draw the frames to hide: [batch, frames] bool; None if `time_probability` is 0.

    Args:
        lengths: frames of each clip.
        frames: frames of the batch, padding included.
        config: share and length of spans.
        seeds: one per clip.
    """
    if not config.time_probability:
        return None
    rows = torch.zeros(len(lengths), frames, dtype=torch.bool)
    for row, length, seed in zip(rows, lengths, seeds, strict=True):
        spans = _spans(length, config.time_probability, config.time_length, config.time_least, seed, "time")
        row[torch.from_numpy(spans)] = True
    return rows


def channel_mask(width: int, config: SpanMaskConfig, seeds: Sequence[int]) -> Tensor | None:
    """Draw the channels to zero: [batch, width] bool; None if `channel_probability` is 0."""
    if not config.channel_probability:
        return None
    rows = torch.zeros(len(seeds), width, dtype=torch.bool)
    for row, seed in zip(rows, seeds, strict=True):
        row[torch.from_numpy(_spans(width, config.channel_probability, config.channel_length, 0, seed, "channel"))] = (
            True
        )
    return rows


def _spans(size: int, probability: float, span: int, least: int, seed: int, purpose: str) -> npt.NDArray[np.int64]:
    """Draw the positions, below `size`, that spans cover; the number of spans is right on average.

    There are at most as many spans as leave a position uncovered. If one span would cover all, it is shorter.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{purpose} spans".encode())])
    span = max(1, min(span, size - 1))
    count = min(max(int(probability * size / span + rng.random()), least), max(size - 1, 0) // span)
    starts = rng.choice(size - span + 1, count, replace=False) if count else np.zeros(0, np.int64)
    positions: npt.NDArray[np.int64] = (starts[:, None] + np.arange(span)).ravel()
    return positions
