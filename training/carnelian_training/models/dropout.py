"""Dropout that is fast on a CPU too.

On a CPU, PyTorch's dropout draws 64 random bits per element and takes as long as the convolution before it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero each element with `probability`, rounded to 1 / 65536, and scale the others so that the mean stays.

    Args:
        x: a tensor whose elements have no gaps between them in memory; any order of strides.
        probability: from 0 to below 1; at most 65535 / 65536 is used.
        training: whether to drop; if False, `x` is returned.
    """
    if not training or probability == 0.0 or x.device.type != "cpu":
        return F.dropout(x, probability, training)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(probability * 2**16), 2**16 - 1)
    kept = draws.view(torch.int16)[: x.numel()] >= threshold - 2**15
    scale = kept.to(x.dtype).mul_(2**16 / (2**16 - threshold))
    return x * scale.as_strided(x.shape, x.stride())
