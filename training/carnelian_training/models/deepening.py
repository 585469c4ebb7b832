"""Deeper blocks from trained ones: new sub-blocks that compute the identity at first (Net2DeeperNet).

The method is that of Chen et al. 2016, https://arxiv.org/abs/1511.05641. Its batch norms need no data here.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from carnelian_training.models.blocks import StackConfig
from carnelian_training.models.masked import MaskedBatchNorm


def deepened_stages(source: StackConfig, target: StackConfig) -> list[int]:
    """Return the positions of the stages that :func:`deepen` makes deeper: only their number of sub-blocks differs.

    A new sub-block comes after the ReLU of the first one. The last one of a block has its ReLU only after the residual
    sum, so a block of one sub-block has no place for another.
    """
    pairs = enumerate(zip(source.stages, target.stages, strict=False))
    return [
        i
        for i, (old, new) in pairs
        if 1 < old.repeat < new.repeat and replace(old, repeat=new.repeat, dropout=new.dropout) == new
    ]


def deepen(
    weights: Mapping[str, Tensor], source: StackConfig, target: StackConfig, wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Add the sub-blocks that `target` has after the first sub-block of a block and `source` has not.

    In evaluation the network computes what it did. In training, batch norms of new sub-blocks see statistics of their
    own, which are close to the identity as far as the inputs' distribution is Gaussian before the ReLU.

    Args:
        weights: the trained weights, of a network of `source`.
        source: the trained network's configuration.
        target: the deeper network's configuration.
        wanted: the deeper network's tensors, for their shapes.

    Returns:
        `weights` with those of new sub-blocks, the others moved to their new places.
    """
    added = {i: target.stages[i].repeat - source.stages[i].repeat for i in deepened_stages(source, target)}
    grown = {}
    for name, tensor in weights.items():
        match = re.match(r"(blocks\.\d+\.sub_blocks\.)(\d+)(\..+)", name)
        shift = added.get(source.stage_of(name), 0) if match and match[2] != "0" else 0
        grown[f"{match[1]}{int(match[2]) + shift}{match[3]}" if match else name] = tensor
    for name, shape in ((name, tensor.shape) for name, tensor in wanted.items() if name not in grown):
        match = re.match(r"(blocks\.\d+\.sub_blocks\.)(\d+)\.(.+)", name)
        if match and 1 <= int(match[2]) <= added.get(target.stage_of(name), 0):
            norm = f"{match[1]}0.norm."
            if norm + "weight" in weights:
                grown[name] = _identity(match[3], shape, weights[norm + "weight"], weights[norm + "bias"])
    return grown


def _identity(part: str, shape: torch.Size, scale: Tensor, shift: Tensor) -> Tensor:
    """Return a tensor of a sub-block that is the identity of ReLU(batch norm), whose channels have `scale`, `shift`.

    Args:
        part: the tensor's name in the sub-block.
        shape: its shape.
        scale: [channels]; the standard deviations before the ReLU.
        shift: [channels]; the means before the ReLU.
    """
    if part in ("depthwise.weight", "pointwise.weight"):
        centre = torch.zeros(shape)
        centre[..., shape[-1] // 2] = 1 if part == "depthwise.weight" else torch.eye(shape[0]).unsqueeze(-1)
        return centre
    # Mean and variance of max(0, x), where x is Gaussian.
    scale, shift = scale.float().abs().clamp(min=1e-6), shift.float()
    z = shift / scale
    density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(z)
    mean = shift * share + scale * density
    variance = ((shift * shift + scale * scale) * share + shift * scale * density - mean * mean).clamp(min=0)
    statistics = {
        "norm.running_mean": mean,
        "norm.running_var": variance,
        "norm.weight": (variance + MaskedBatchNorm(0).eps).sqrt(),
        "norm.bias": mean,
    }
    return statistics.get(part, torch.zeros(shape, dtype=torch.int64))  # else the number of batches
