"""Augmentation of padded batches of features: SpecAugment, Cutout and vocal tract length perturbation.

Random numbers for a clip come from its own seed, so they are the same in every batch and every process.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from carnelian_training.config import AugmentConfig
from carnelian_training.features import FeatureSettings
from carnelian_training.mel import to_hz, to_mel


def draws(seeds: Sequence[int], purpose: str, count: int) -> Tensor:
    """Draw numbers uniform in [0, 1), [clips, count] float64, which depend only on each clip's seed and the purpose."""
    stream = zlib.crc32(purpose.encode())
    return torch.from_numpy(np.stack([np.random.default_rng([seed, stream]).random(count) for seed in seeds]))


def spec_augment(features: Tensor, lengths: Tensor, config: AugmentConfig, seeds: Sequence[int]) -> Tensor:
    """Zero random bands, stretches of time and boxes of each clip (SpecAugment, Park et al. 2019, arXiv:1904.08779).

    Args:
        features: [batch, mels, frames] float32.
        lengths: [batch] int64, frames of each clip; on the same device.
        config: numbers and widths of the masks.
        seeds: one per row.
    """
    masked = torch.zeros_like(features, dtype=torch.bool)
    drawn = draws(seeds, "spec_augment", 2 * (config.frequency_masks + config.time_masks + 2 * config.cutout_boxes))
    drawn = drawn.to(features.device)
    pairs = iter(torch.split(drawn, 2, dim=1))
    num_mels = torch.full_like(lengths, features.shape[1])
    widest = torch.full_like(lengths, config.frequency_mask_bands)
    for _ in range(config.frequency_masks):
        masked |= _spans(num_mels, widest, features.shape[1], next(pairs))[:, :, None]
    widest = (lengths * config.time_mask_share).long().clamp(max=config.time_mask_frames)
    for _ in range(config.time_masks):
        masked |= _spans(lengths, widest, features.shape[2], next(pairs))[:, None, :]
    for _ in range(config.cutout_boxes):
        bands = torch.full_like(lengths, config.cutout_bands)
        frames = torch.full_like(lengths, config.cutout_frames)
        box = _spans(num_mels, bands, features.shape[1], next(pairs))[:, :, None]
        masked |= box & _spans(lengths, frames, features.shape[2], next(pairs))[:, None, :]
    return features.masked_fill(masked, 0.0)


def warp_frequency(features: Tensor, settings: FeatureSettings, config: AugmentConfig, seeds: Sequence[int]) -> Tensor:
    """Scale each clip's frequencies by a random factor: vocal tract length perturbation (Jaitly and Hinton 2013).

    Args:
        features: [batch, mels, frames] float32. Where the source lies outside the bands, the outermost band is used.
        settings: settings of the features, for the frequencies of the bands.
        config: the factor is uniform in 1 +- `frequency_warp`.
        seeds: one per row.
    """
    if not config.frequency_warp:
        return features
    num_mels = features.shape[1]
    factor = 1 + config.frequency_warp * (2 * draws(seeds, "warp_frequency", 1).float() - 1)
    low, high = to_mel(torch.tensor([settings.low_hz, settings.high_hz]))
    band_mel = (high - low) / (num_mels + 1)
    centre_hz = to_hz(low + (torch.arange(num_mels) + 1) * band_mel)
    source = ((to_mel(centre_hz * factor) - low) / band_mel - 1).clamp(0, num_mels - 1)  # [batch, mels], in bands
    below = source.floor().long()
    share = (source - below)[:, :, None].to(features.device)
    index = below[:, :, None].expand_as(features).to(features.device)
    return torch.lerp(features.gather(1, index), features.gather(1, (index + 1).clamp(max=num_mels - 1)), share)


def _spans(sizes: Tensor, widest: Tensor, size: int, drawn: Tensor) -> Tensor:
    """Make a mask of one span per row, [batch, size] bool.

    Args:
        sizes: [batch] int64; the span lies within the first `sizes` positions.
        widest: [batch] int64; the width is uniform in [0, widest].
        size: length of the mask.
        drawn: [batch, 2], uniform in [0, 1), from which width and start are computed.
    """
    width = (drawn[:, 0] * (widest + 1)).long().minimum(sizes)
    start = (drawn[:, 1] * (sizes - width + 1)).long()
    position = torch.arange(size, device=sizes.device)
    return (position >= start[:, None]) & (position < (start + width)[:, None])
