"""Depthwise convolution over time for training on a CPU, with its own weight gradient, and a check of the GPU kernels.

oneDNN computes the result and the input's gradient of a depthwise convolution about as fast as the machine can, but its
weight gradient takes several times as long as both, up to 20 times with QuartzNet's wide kernels: it was most of a
training step. `perf/results/quartznet_15x5_training.md` has the ratios.

All of it is in float32, because oneDNN's depthwise kernels for bfloat16 take twice as long.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]


def convolve_depthwise(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolve `x` [batch, channels, 1, frames] with `weight` [channels, 1, 1, kernel], kernel odd, "same" padding.

    Under autocast, too, the result is float32.
    """
    with torch.autocast("cpu", enabled=False):
        result: Tensor = _DepthwiseConv.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    return result


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)  # no float32 copy of `x`, which may be bfloat16
        ctx.stride = stride
        return F.conv2d(x.float(), weight, None, (1, stride), (0, weight.shape[3] // 2), 1, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved, weight = ctx.saved_tensors
        x = saved.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x, _, _ = torch.ops.aten.convolution_backward(
                grad,
                x,
                weight,
                None,
                [1, ctx.stride],
                [0, weight.shape[3] // 2],
                [1, 1],
                False,
                [0, 0],
                weight.shape[0],
                [True, False, False],
            )
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(x, grad, ctx.stride, weight.shape[3])
        return grad_x, grad_weight, None  # autograd rounds `grad_x` to the type of `x`


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels of `depthwise_gpu.py` run on the GPU `device`; log a warning if they do not."""
    try:
        from carnelian_training.models.depthwise_gpu import convolve_depthwise  # only PyTorch for CUDA has Triton

        with torch.no_grad():
            convolve_depthwise(torch.zeros(1, 16, 1, 16, device=device), torch.zeros(16, 1, 1, 1, device=device))
    except Exception as error:  # Triton missing or too old, no C compiler, an old GPU, no room for compiled code
        logger.warning(
            "our depthwise kernels need a C compiler and Triton 3.3, of PyTorch 2.7, or later; PyTorch's, "
            "half as fast in QuartzNet, stand in for them: %s",
            str(error).strip().partition("\n")[0],
        )
        return False
    return True


def weight_gradient(x: Tensor, grad: Tensor, stride: int, kernel: int) -> Tensor:
    """Compute the gradient of a depthwise convolution's weight: [channels, 1, 1, kernel] float32.

    Args:
        x: [batch, channels, 1, frames] float32, the input.
        grad: [batch, channels, 1, frames'] float32, the gradient of the result.
        stride: frames of the input per frame of the result.
        kernel: width of the kernel in frames, odd.
    """
    rows, grad_rows = _rows(x), _rows(grad)
    threads = torch.get_num_threads()
    sums = np.zeros((threads, kernel, x.shape[1]), np.float32)
    ends = [i * len(rows) * _pairs(grad_rows) // threads for i in range(threads + 1)]
    if threads == 1:
        _correlate(rows, grad_rows, stride, ends[0], ends[1], sums[0])
    else:
        parts = [(rows, grad_rows, stride, *ends[i : i + 2], sums[i]) for i in range(threads)]
        deque(_pool(threads).map(lambda part: _correlate(*part), parts), maxlen=0)
    return torch.from_numpy(sums.sum(0)).t()[:, None, None, :]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _rows(x: Tensor) -> Array:
    # [B, C, 1, T] -> [B, T, C]: a view if `x` is channels last
    rows: Array = x.squeeze(2).transpose(1, 2).contiguous().numpy()
    return rows


def _compile(function: Callable[..., None]) -> Callable[..., None]:
    """Compile `function`; cache its machine code for other processes if a cache folder can be written.

    numba tries the folder of this file, then the user's home.
    """
    compiled: Callable[..., None]
    try:
        Path.home()  # raises without a home folder, where numba would make a folder named `~`
        compiled = numba.njit(fastmath=True, nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(fastmath=True, nogil=True)(function)
    return compiled


@numba.njit(inline="always")
def _pairs(grad: Array) -> int:
    return (grad.shape[1] + 1) // 2


@_compile
def _correlate(x: Array, grad: Array, stride: int, start: int, end: int, sums: Array) -> None:
    """Add to sums [kernel, channels] the products of x [batch, frames, channels] and grad [batch, frames', channels].

    Row i of `sums` gets the products at offset i. Frames of `grad` are taken in pairs, which halves the memory traffic
    of `sums`: the pairs from number `start` of the batch to before `end`.
    """
    kernel, channels = sums.shape
    for pair in range(start, end):
        clip = pair // _pairs(grad)
        frame = 2 * (pair - clip * _pairs(grad))
        is_pair = frame + 1 < grad.shape[1]
        for i in range(kernel):
            first = frame * stride + i - kernel // 2
            second = first + stride
            has_first, has_second = 0 <= first < x.shape[1], is_pair and 0 <= second < x.shape[1]
            if has_first and has_second:
                for c in range(channels):
                    sums[i, c] += (
                        x[clip, first, c] * grad[clip, frame, c] + x[clip, second, c] * grad[clip, frame + 1, c]
                    )
            elif has_first:
                for c in range(channels):
                    sums[i, c] += x[clip, first, c] * grad[clip, frame, c]
            elif has_second:
                for c in range(channels):
                    sums[i, c] += x[clip, second, c] * grad[clip, frame + 1, c]
