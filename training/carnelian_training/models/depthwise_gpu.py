"""Depthwise convolution over time for NVIDIA GPUs, in the Triton language (https://triton-lang.org, not the server).

PyTorch and cuDNN take 1.3 to 3 times as long with QuartzNet's wide kernels in half precision, and up to 20 times in
float32: `perf/results/quartznet_15x5_training_gpu.md` has the ratio of whole steps.

The kernels work on rows, [batch, frames, channels], which is how [batch, channels, 1, frames] lies in memory with
channels last. Sums are float32, in an order that does not depend on timing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 16
"""Results that one program of a kernel computes at once, from a window of 31 values; each enters up to 16 results."""
TILE_CHANNELS = 128
WARPS = 2
SPLITS = 64
"""Parts of the batch whose sums of the weight gradient are computed separately, so that the whole GPU has work."""


def convolve_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve `x` [batch, channels, 1, frames] with `weight` [channels, 1, 1, kernel], kernel odd, "same" padding.

    Under autocast, `x` and the result have the dtype of autocast; weights and sums stay float32.
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
    # [B, C, 1, T] -> [B, T, C]: a view if `x` is channels last
    return x.squeeze(2).transpose(1, 2).contiguous()


def _convolve(x: Tensor, weight: Tensor, *, reverse: bool) -> Tensor:
    """Convolve `x`, or with `reverse` compute the input's gradient from `x`, the gradient of the result."""
    rows = _rows(x)
    batch, frames, channels = rows.shape
    taps = weight[:, 0, 0, :].t()  # [kernel, channels]
    taps = (taps.flip(0) if reverse else taps).contiguous()
    out = torch.empty_like(rows)
    grid = (triton.cdiv(frames, RUN), triton.cdiv(channels, TILE_CHANNELS), batch)
    _convolve_run[grid](rows, taps, out, frames, channels, weight.shape[3], RUN, TILE_CHANNELS, num_warps=WARPS)
    return out.transpose(1, 2).unsqueeze(2)


def _sum_products(x: Tensor, grad: Tensor, kernel: int) -> Tensor:
    """Compute the weight's gradient, [channels, 1, 1, kernel] float32, from the input and the result's gradient."""
    rows, grad_rows = _rows(x), _rows(grad)
    batch, frames, channels = rows.shape
    sums = rows.new_empty((SPLITS, kernel, channels), dtype=torch.float32)
    grid = (triton.cdiv(channels, TILE_CHANNELS), triton.cdiv(kernel, RUN), SPLITS)
    _sum_run[grid](rows, grad_rows, sums, batch, frames, channels, kernel, SPLITS, RUN, TILE_CHANNELS, num_warps=WARPS)
    return sums.sum(0).t()[:, None, None, :]


# One compiled kernel serves every width and length, because compiling takes seconds.
@triton.jit(do_not_specialize=["frames", "kernel"])
def _convolve_run(x, taps, out, frames, channels, kernel, run: tl.constexpr, tile_c: tl.constexpr):
    """Compute `run` frames of `out` for one tile of channels of one clip."""
    t = tl.program_id(0) * run
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    clip = tl.program_id(2).to(tl.int64) * frames * channels
    totals = _zeros(run, tile_c)
    for k in range(0, kernel, run):
        weights = _load_run(taps, k, kernel, c, channels, run)
        totals = _correlate(totals, weights, x + clip, t + k - kernel // 2, frames, c, channels, run)
    for i in tl.static_range(run):
        place = out + clip + (t + i) * channels + c
        tl.store(place, totals[i].to(out.dtype.element_ty), (c < channels) & (t + i < frames))


@triton.jit(do_not_specialize=["batch", "frames", "kernel"])
def _sum_run(
    x, grad, sums, batch, frames, channels, kernel, splits: tl.constexpr, run: tl.constexpr, tile_c: tl.constexpr
):
    """Compute `run` taps of `sums` for one tile of channels, over every `splits`-th stretch of `run` frames."""
    c = tl.program_id(0) * tile_c + tl.arange(0, tile_c)
    k = tl.program_id(1) * run
    split = tl.program_id(2)
    totals = _zeros(run, tile_c)
    stretches = tl.cdiv(frames, run)
    for stretch in range(split, batch * stretches, splits):
        clip = (stretch // stretches).to(tl.int64) * frames * channels
        t = stretch % stretches * run
        of_result = _load_run(grad + clip, t, frames, c, channels, run)
        totals = _correlate(totals, of_result, x + clip, t + k - kernel // 2, frames, c, channels, run)
    for i in tl.static_range(run):
        place = sums + (split * kernel + k + i) * channels + c
        tl.store(place, totals[i], (c < channels) & (k + i < kernel))


@triton.jit
def _zeros(run: tl.constexpr, tile_c: tl.constexpr):
    rows = ()
    for _ in tl.static_range(run):
        rows += (tl.zeros((tile_c,), tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _load_run(rows, start, end, c, channels, run: tl.constexpr):
    """Load the rows `start` to `start + run` of [end, channels] as float32; rows past the end are zero."""
    loaded = ()
    for i in tl.static_range(run):
        is_inside = (c < channels) & (start + i < end)
        loaded += (tl.load(rows + (start + i) * channels + c, is_inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _correlate(totals, weights, x, start, frames, c, channels, run: tl.constexpr):
    """Add to each total i the sum over j of `weights[j]` times the row `start + i + j` of `x` [frames, channels]."""
    for place in tl.static_range(2 * run - 1):
        source = start + place
        is_inside = (c < channels) & (source >= 0) & (source < frames)
        value = tl.load(x + source * channels + c, is_inside, other=0.0).to(tl.float32)
        added = ()
        for i in tl.static_range(run):
            if place - i >= 0 and place - i < run:
                added += (totals[i] + value * weights[place - i],)  # type: ignore[assignment]
            else:
                added += (totals[i],)  # type: ignore[assignment]
        totals = added
    return totals
