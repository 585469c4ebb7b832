"""Dropout that is quick on a CPU too.

PyTorch's draws 64 random bits for each element there and takes as long as the convolution before it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero each element with `probability`, in steps of 1 / 65536, and scale the others so that the mean stays.

    Args:
        x: without gaps between its elements, whatever their order.
        probability: below 1; above 65535 / 65536 it is that.
        training: otherwise `x` is returned.
    """
    if not training or probability == 0.0 or x.device.type != "cpu":
        return F.dropout(x, probability, training)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    threshold = min(round(probability * 2**16), 2**16 - 1)
    kept = draws.view(torch.int16)[: x.numel()] >= threshold - 2**15
    scale = kept.to(x.dtype).mul_(2**16 / (2**16 - threshold))
    return x * scale.as_strided(x.shape, x.stride())
