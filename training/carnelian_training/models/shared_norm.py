"""Batch normalisation with one mean and variance over the rows of all processes (gloo, NCCL or one process alone).

PyTorch's SyncBatchNorm works on GPUs only and knows no padding. The rows here are real frames, of any number per
process, even none.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def shared_batch_norm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise each channel over all processes; every process has to call it, in the same order.

    Args:
        rows: [frames, channels], any floating-point type; the statistics are float32.
        weight: [channels], the scale of each channel.
        bias: [channels], the offset of each channel.
        running_mean: [channels], moved in place towards the mean of the rows.
        running_variance: [channels], moved in place towards the unbiased variance of the rows.
        momentum: by what share the two move, 0 to 1.
        eps: added to the variance before the square root.

    Returns:
        [frames, channels] of the type of `rows`.
    """
    # A variance from sums of squares loses digits if the mean is large, so an estimate that all processes share is
    # subtracted first.
    normalised, mean, variance, count = _SharedNorm.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, running_mean.clone(), eps
    )
    with torch.no_grad():
        share = momentum * (count > 1)  # the unbiased variance needs two rows
        running_mean.lerp_(mean, share)
        running_variance.lerp_(variance * count / (count - 1).clamp(min=1), share)
    out: Tensor = normalised
    return out


class _SharedNorm(torch.autograd.Function):
    """Autograd function of :func:`shared_batch_norm`: one all-reduce in the forward pass, one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, guess: Tensor, eps: float) -> tuple[Tensor, ...]:
        centred = rows.float() - guess
        sums = torch.cat([centred.sum(0), centred.square().sum(0), centred.new_tensor([len(rows)])])
        _add_up(sums)
        channels = len(weight)
        count = sums[-1].clamp(min=1)
        shift = sums[:channels] / count
        variance = (sums[channels:-1] / count - shift.square()).clamp(min=0)
        mean, inverse = guess + shift, (variance + eps).rsqrt()
        ctx.save_for_backward(rows, weight, mean, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        normalised = torch.addcmul(bias - mean * inverse * weight, rows.float(), inverse * weight)
        return normalised.to(rows.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, inverse, count = ctx.saved_tensors
        gradient = gradients[0].float()
        standard = (rows.float() - mean) * inverse
        of_bias, of_weight = gradient.sum(0), (gradient * standard).sum(0)
        sums = torch.cat([of_bias, of_weight])
        _add_up(sums)
        mean_gradient, mean_product = (sums / count).chunk(2)
        of_rows = (gradient - mean_gradient - standard * mean_product) * (inverse * weight)
        return of_rows.to(rows.dtype), of_weight, of_bias, None, None


def _add_up(values: Tensor) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
