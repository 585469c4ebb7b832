"""SpecAugment on padded batches (Park et al. 2019, https://arxiv.org/abs/1904.08779)."""

import torch
from torch import Tensor

from carnelian_training.config import AugmentConfig


def spec_augment(features: Tensor, lengths: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Zero random bands and stretches of time, drawn for each clip on its own.

    Args:
        features: [batch, mels, frames] float32.
        lengths: [batch] int64, frames.
        config: how many masks, how wide.
        generator: on the CPU, whatever the device of `features`, so that every device sees the same masks.
    """
    masked = torch.zeros(features.shape, dtype=torch.bool)
    num_mels = torch.full_like(lengths, features.shape[1])
    widest = torch.full_like(lengths, config.frequency_mask_bands)
    for _ in range(config.frequency_masks):
        masked |= _spans(num_mels, widest, features.shape[1], generator)[:, :, None]
    widest = (lengths * config.time_mask_share).long().clamp(max=config.time_mask_frames)
    for _ in range(config.time_masks):
        masked |= _spans(lengths, widest, features.shape[2], generator)[:, None, :]
    return features.masked_fill(masked.to(features.device), 0.0)


def _spans(sizes: Tensor, widest: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """One span per row, of width uniform in [0, widest] within [0, sizes): [batch, size] bool."""
    width = (torch.rand(len(sizes), generator=generator) * (widest + 1)).long().minimum(sizes)
    start = (torch.rand(len(sizes), generator=generator) * (sizes - width + 1)).long()
    position = torch.arange(size)
    return (position >= start[:, None]) & (position < (start + width)[:, None])
