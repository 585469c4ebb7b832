"""Augmentation of padded batches of features: SpecAugment, Cutout and vocal tract length perturbation.

What is drawn for a clip comes from its own seed: it is the same in every batch and in every process.
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
    """Numbers uniform in [0, 1), [clips, count] float64, that depend on each clip's seed and the purpose alone."""
    stream = zlib.crc32(purpose.encode())
    return torch.from_numpy(np.stack([np.random.default_rng([seed, stream]).random(count) for seed in seeds]))


def spec_augment(features: Tensor, lengths: Tensor, config: AugmentConfig, seeds: Sequence[int]) -> Tensor:
    """Zero random bands, stretches of time and boxes, drawn for each clip (Park et al. 2019, arXiv:1904.08779).

    Args:
        features: [batch, mels, frames] float32.
        lengths: [batch] int64, frames; on the same device.
        config: how many masks, how wide.
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
    """Scale each clip's frequencies by its own factor, as another length of vocal tract would (Jaitly and Hinton 2013).

    Args:
        features: [batch, mels, frames] float32. Bands that would come from outside theirs repeat the last one there.
        settings: what frequencies the bands are of.
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
    """One span per row, of width uniform in [0, widest] within [0, sizes): [batch, size] bool.

    Args:
        sizes: [batch] int64.
        widest: [batch] int64.
        size: of the axis.
        drawn: [batch, 2], uniform in [0, 1): where in their ranges the width and the start lie.
    """
    width = (drawn[:, 0] * (widest + 1)).long().minimum(sizes)
    start = (drawn[:, 1] * (sizes - width + 1)).long()
    position = torch.arange(size, device=sizes.device)
    return (position >= start[:, None]) & (position < (start + width)[:, None])
