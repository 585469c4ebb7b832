"""Hold the Triton kernels to PyTorch's convolutions.

python interpret_depthwise.py [cpu]: run by Triton's interpreter (TRITON_INTERPRET=1); or cuda, where there is a GPU.
"""

import sys

import torch
from carnelian_training.models import depthwise_gpu as kernels
from carnelian_training.models.masked import MaskedConv
from torch import Tensor
from torch.nn import functional as F

# Channels, kernel, dilation, frames: parts of a tile and several tiles of each, and more stretches than splits.
USUAL = [(8, 5, 1, 20), (8, 7, 2, 21)]
LARGE = [(70, 33, 1, 66), (5, 33, 1, 7), (3, 1, 1, 1), (130, 75, 1, 20), (8, 5, 1, 600)]
SMALL = [(18, 9, 1, 10), (5, 9, 1, 3), (3, 1, 1, 1)]
"""In tiles of `SMALL_TILES` what LARGE is in the kernels' own, for which the interpreter takes a minute of a core."""
SMALL_TILES = {"RUN": 4, "TILE_CHANNELS": 16, "SPLITS": 3}


def main(device: str = "cpu") -> None:
    torch.set_default_device(device)
    torch.manual_seed(0)
    compare(device, USUAL)
    if device == "cpu":
        for name, value in SMALL_TILES.items():
            setattr(kernels, name, value)
    compare(device, SMALL if device == "cpu" else LARGE)


def compare(device: str, shapes: list[tuple[int, int, int, int]]) -> None:
    for channels, kernel, dilation, frames in shapes:
        conv = MaskedConv(channels, channels, kernel, dilation=dilation, groups=channels).train()
        x = torch.randn(2, channels, 1, frames).to(memory_format=torch.channels_last).requires_grad_()
        padding = dilation * (kernel // 2)
        expected = F.conv2d(x, conv.weight, None, 1, (0, padding), (1, dilation), channels)
        upstream = torch.randn_like(expected)
        for ours, reference in zip(run(conv, x, upstream), gradients(expected, conv, x, upstream), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
        with torch.autocast(device, torch.float16):
            halves = run(conv, x, upstream.half())
        assert [tensor.dtype for tensor in halves] == [torch.float16, torch.float32, torch.float32]
        for ours, reference in zip(halves, gradients(expected, conv, x, upstream), strict=True):
            assert (ours - reference).norm() < 0.01 * reference.norm()  # eleven bits of a float16


def run(conv: MaskedConv, x: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    conv.uses_triton = True
    return gradients(conv(x), conv, x, upstream)


def gradients(result: Tensor, conv: MaskedConv, x: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    return result, *torch.autograd.grad(result, (x, conv.weight), upstream, retain_graph=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
