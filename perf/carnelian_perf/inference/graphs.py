"""Run a network as CUDA graphs on an NVIDIA GPU; a Jasper or QuartzNet is also fused into few kernels.

At small batches, a GPU waits for the CPU to start kernels; at large ones, most of the work outside convolutions is
reading and writing memory again. A graph starts all kernels at once; and bias, residual sum and ReLU are done by the
convolution or matrix product before them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from carnelian_export.graph.folding import FoldedSubBlock
from carnelian_training.models.blocks import Block, Projection
from carnelian_training.models.masked import Mask, MaskedConv, use_gpu_kernels
from carnelian_training.models.network import CtcNetwork, StackNetwork
from torch import Tensor, nn

Array = npt.NDArray[np.float32]


def run_graphs(lowered: CtcNetwork, dtype: torch.dtype) -> Callable[[Array, npt.NDArray[np.int32]], Array]:
    """Make a function that runs a network as a CUDA graph, captured anew when the shape of the batch changes.

    Args:
        lowered: The network as :func:`carnelian_export.graph.precision.lower` returns it, on the GPU.
        dtype: Precision of the network.

    Returns:
        The function: features [rows, num_mels, frames], lengths [rows] -> log-probabilities [rows, frames', labels].
    """
    if isinstance(lowered, StackNetwork):
        fuse(lowered)
    for conv in use_gpu_kernels(lowered, torch.device("cuda")):
        # Store the weight as the kernel reads it, tap by tap, to save a copy at each use: [C, 1, 1, K], view of [K, C].
        conv.weight.data = conv.weight[:, 0, 0, :].t().contiguous().t()[:, None, None, :]
    capture = functools.lru_cache(maxsize=1)(functools.partial(_Graph, lowered, dtype))  # one: each has own memory

    @torch.inference_mode()
    def run(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        return capture(features.shape).run(features, lengths)

    return run


def fuse(lowered: StackNetwork) -> None:
    """Replace the network's blocks by blocks of few kernels, and store weights in the order in which they are read."""
    lowered.blocks = nn.ModuleList(_FusedBlock(cast(Block, block)) for block in lowered.blocks)
    # Activations are in channels last, too; otherwise cuDNN would copy the weights at each use.
    lowered.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class _Graph:
    """The CUDA graph of a network for one shape of batch, with the buffers that its copies read and write."""

    def __init__(self, network: CtcNetwork, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.features, self.lengths = torch.zeros(shape, pin_memory=True), torch.zeros(shape[0], dtype=torch.int64)
        self.inputs = features, lengths = self.features.cuda(), self.lengths.cuda()  # the graph reads them
        self.lengths = self.lengths.pin_memory()

        def forward() -> Tensor:
            features.copy_(self.features, non_blocking=True)
            lengths.copy_(self.lengths, non_blocking=True)
            log_probs: Tensor = network(features.to(dtype), lengths)[0]
            return log_probs.float()

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32), torch.cuda.stream(stream):
            self.log_probs = forward().cpu().pin_memory()  # compiles kernels and chooses cuDNN's before the capture
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.log_probs.copy_(forward(), non_blocking=True)

    def run(self, features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        self.features.copy_(torch.from_numpy(features))
        self.lengths.copy_(torch.from_numpy(lengths))
        self.graph.replay()
        torch.cuda.synchronize()
        return self.log_probs.numpy().copy()


class _FusedBlock(nn.Module):
    """A block with folded batch norms, whose bias, residual sum and ReLU need no kernels of their own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.sub_blocks = block.sub_blocks
        self.projection = block.projection
        first = [] if block.projection is None else [block.projection]
        self.projections = nn.ModuleList(first + [cast(Projection, projection).conv for projection in block.earlier])
        last = cast(FoldedSubBlock, block.sub_blocks[-1]).pointwise
        biases = [cast(Tensor, conv.bias).detach() for conv in self.projections]
        if last.kernel_size[1] == 1:  # otherwise the convolution adds its own bias
            biases.append(cast(Tensor, last.bias).detach())
        self.register_buffer("bias", torch.stack(biases).sum(0) if self.projections else None)

    def forward(self, x: Tensor, mask: Mask, earlier: Sequence[Tensor] = ()) -> tuple[Tensor, Mask]:
        """Transform `x` [batch, in_channels, 1, frames] as :class:`Block` does."""
        residual = self._project([x, *earlier]) if self.projections else None
        *sub_blocks, last = (cast(FoldedSubBlock, sub_block) for sub_block in self.sub_blocks)
        for sub_block in sub_blocks:
            x, mask = _apply(sub_block, x, mask, None)
        return _apply(last, x, mask, residual)

    def _project(self, inputs: Sequence[Tensor]) -> Tensor:
        """Sum the projections of the inputs; the matrix product of each one also adds it to the sum."""
        weights = [cast(MaskedConv, conv).weight.flatten(1).t() for conv in self.projections]
        total = torch.addmm(cast(Tensor, self.bias), _rows(inputs[0]), weights[0])
        for weight, x in zip(weights[1:], inputs[1:], strict=True):
            total.addmm_(_rows(x), weight)
        return _batch(total, inputs[0])


def _apply(sub_block: FoldedSubBlock, x: Tensor, mask: Mask, residual: Tensor | None) -> tuple[Tensor, Mask]:
    """Apply a sub-block and then ReLU; a `residual` of :meth:`_FusedBlock._project` is added before the ReLU."""
    if sub_block.depthwise is not None:
        x = sub_block.depthwise(mask.apply(x))
        mask = mask.strided(sub_block.depthwise.stride[1])
    conv = sub_block.pointwise
    bias = cast(Tensor, conv.bias)
    if conv.kernel_size[1] == conv.stride[1] == 1:
        weight = conv.weight.flatten(1).t()
        if residual is None:
            return _batch(torch._addmm_activation(bias, _rows(x), weight), x), mask
        return _batch(_rows(residual).addmm_(_rows(x), weight).relu_(), x), mask
    x = mask.apply(x)
    mask = mask.strided(conv.stride[1])
    if conv.dilation[1] > 1:
        x = conv(x)
        return (x if residual is None else x + residual).relu_(), mask
    how = conv.stride, cast(tuple[int, int], conv.padding), conv.dilation, 1
    if residual is None:
        return torch.cudnn_convolution_relu(x, conv.weight, bias, *how), mask
    return torch.cudnn_convolution_add_relu(x, conv.weight, residual, 1.0, bias, *how), mask


def _rows(x: Tensor) -> Tensor:
    # [B, C, 1, T] -> [B * T, C]: a view with channels last
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _batch(rows: Tensor, like: Tensor) -> Tensor:
    """`rows` [batch * frames, channels] as [batch, channels, 1, frames]."""
    return rows.view(like.shape[0], 1, like.shape[3], -1).permute(0, 3, 1, 2)
