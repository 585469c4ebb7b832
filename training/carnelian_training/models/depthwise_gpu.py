"""Depthwise convolution over time for NVIDIA GPUs, in the Triton language (https://triton-lang.org, not the server).

Not the default: tests hold its results to PyTorch's in Triton's interpreter and compile it for GPUs, but no GPU has run
it yet. `loop.depthwise: triton` chooses it, and `carnelian-perf training` tells whether it pays.

Tensors are rows, [batch, frames, channels], which is what channels last makes of [batch, channels, 1, frames]. Sums are
float32, in an order that does not depend on timing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tiles for QuartzNet's 256 and 512 channels and 33 to 87 taps; all powers of two, as Triton demands.
TILE_FRAMES, TILE_CHANNELS = 64, 64
SUM_FRAMES, SUM_TAPS, SUM_CHANNELS = 16, 16, 32
SPLITS = 32
"""Parts of the batch whose sums of the weight gradient are formed apart, so that all of a GPU has work."""


def convolve_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve `x` [batch, channels, 1, frames] with `weight` [channels, 1, 1, kernel], kernel odd, "same" padding.

    Under autocast `x` and the result have its type; weights and sums stay float32.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = _DepthwiseConv.apply(x, weight)
    return result


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight, reverse=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = _convolve(grad, weight, reverse=True) if ctx.needs_input_grad[0] else None
        grad_weight = _sum_products(x, grad, weight.shape[3]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _rows(x: Tensor) -> Tensor:
    # [B, C, 1, T] -> [B, T, C]: a view with channels last
    return x.squeeze(2).transpose(1, 2).contiguous()


def _convolve(x: Tensor, weight: Tensor, *, reverse: bool) -> Tensor:
    """Convolve, or with `reverse` bring a gradient of the result back to the input."""
    rows = _rows(x)
    batch, frames, channels = rows.shape
    taps = weight[:, 0, 0, :].t().contiguous()  # [kernel, channels]
    out = torch.empty_like(rows)
    grid = (triton.cdiv(frames, TILE_FRAMES), triton.cdiv(channels, TILE_CHANNELS), batch)
    _convolve_tile[grid](rows, taps, out, frames, channels, weight.shape[3], reverse, TILE_FRAMES, TILE_CHANNELS)
    return out.transpose(1, 2).unsqueeze(2)


def _sum_products(x: Tensor, grad: Tensor, kernel: int) -> Tensor:
    """The gradient of the weight, [channels, 1, 1, kernel] float32."""
    rows, grad_rows = _rows(x), _rows(grad)
    batch, frames, channels = rows.shape
    sums = rows.new_empty((SPLITS, kernel, channels), dtype=torch.float32)
    grid = (triton.cdiv(channels, SUM_CHANNELS), triton.cdiv(kernel, SUM_TAPS), SPLITS)
    _sum_tile[grid](rows, grad_rows, sums, batch, frames, channels, kernel, SPLITS, SUM_FRAMES, SUM_TAPS, SUM_CHANNELS)
    return sums.sum(0).t()[:, None, None, :]


@triton.jit
def _convolve_tile(
    x,
    taps,
    out,
    frames,
    channels,
    kernel: tl.constexpr,
    reverse: tl.constexpr,
    tile_t: tl.constexpr,
    tile_c: tl.constexpr,
):
    """One tile of `out`: frames by channels of one clip."""
    t = tl.program_id(0) * tile_t + tl.arange(0, tile_t)
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    clip = tl.program_id(2).to(tl.int64) * frames * channels
    is_channel = c < channels
    total = tl.zeros((tile_t, tile_c), tl.float32)
    for k in range(kernel):
        source = t + k - kernel // 2
        is_inside = (source >= 0) & (source < frames)
        values = tl.load(
            x + clip + source[:, None] * channels + c[None, :], is_inside[:, None] & is_channel[None, :], other=0.0
        )
        tap = kernel - 1 - k if reverse else k
        total += values.to(tl.float32) * tl.load(taps + tap * channels + c, is_channel, other=0.0)[None, :]
    places = out + clip + t[:, None] * channels + c[None, :]
    tl.store(places, total.to(out.dtype.element_ty), (t < frames)[:, None] & is_channel[None, :])


@triton.jit
def _sum_tile(
    x,
    grad,
    sums,
    batch,
    frames,
    channels,
    kernel: tl.constexpr,
    splits: tl.constexpr,
    tile_t: tl.constexpr,
    tile_k: tl.constexpr,
    tile_c: tl.constexpr,
):
    """One tile of `sums`: taps by channels, over every `splits`-th stretch of `tile_t` frames."""
    c = tl.program_id(0) * tile_c + tl.arange(0, tile_c)
    k = tl.program_id(1) * tile_k + tl.arange(0, tile_k)
    split = tl.program_id(2)
    is_channel = c < channels
    total = tl.zeros((tile_k, tile_c), tl.float32)
    stretches = tl.cdiv(frames, tile_t)
    for stretch in range(split, batch * stretches, splits):
        clip = (stretch // stretches).to(tl.int64) * frames * channels
        t = stretch % stretches * tile_t + tl.arange(0, tile_t)
        of_result = tl.load(
            grad + clip + t[:, None] * channels + c[None, :], (t < frames)[:, None] & is_channel[None, :], other=0.0
        )
        source = t[:, None] + k[None, :] - kernel // 2
        is_inside = (source >= 0) & (source < frames)
        values = tl.load(
            x + clip + source[:, :, None] * channels + c[None, None, :],
            is_inside[:, :, None] & is_channel[None, None, :],
            other=0.0,
        )
        total += tl.sum(values.to(tl.float32) * of_result.to(tl.float32)[:, None, :], axis=0)
    places = sums + (split * kernel + k[:, None]) * channels + c[None, :]
    tl.store(places, total, (k < kernel)[:, None] & is_channel[None, :])
