"""The building blocks of Jasper and QuartzNet: stages of equal blocks, each of sub-blocks and a residual sum.

Every module takes tensors [batch, channels, 1, frames] and a :class:`Mask`, as `masked.py` explains.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from carnelian_training.checks import check_at_least_one, check_below_one
from carnelian_training.models.dropout import dropout
from carnelian_training.models.masked import Mask, MaskedBatchNorm, MaskedConv


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """`blocks` equal blocks in a row, each of `repeat` sub-blocks: convolution, batch norm, ReLU, dropout."""

    filters: int
    kernel: int
    """The kernel width in frames of the stage's input; odd."""
    blocks: int = 1
    repeat: int = 1
    stride: int = 1
    """The stride of the first sub-block of each block; the other sub-blocks have stride 1."""
    dilation: int = 1
    dropout: float = 0.0
    residual: bool = True
    separable: bool = True
    """Whether a depthwise convolution over time and a pointwise one over channels replace each full convolution."""

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd, so that output frames stay centred, but is {self.kernel}")
        check_at_least_one(self, "filters", "kernel", "blocks", "repeat", "stride", "dilation")
        check_below_one(self, "dropout")
        if self.stride > 1 and self.dilation > 1:
            raise ValueError(
                f"only one of `stride` and `dilation` may be above 1, but they are {self.stride} and {self.dilation}"
            )
        if self.residual and self.stride > 1:
            raise ValueError(
                f"a residual block keeps the frame rate: set `residual: false` or `stride: 1` (is {self.stride})"
            )


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The configuration of a B x R stack of blocks, stem and head included, as a list of stages.

    Each architecture has its own subclass.
    """

    stages: tuple[StageConfig, ...]
    num_mels: int = 64
    """The number of mel bands of the features; stored with the model."""
    head_frames: int = 1
    """Output frames that the head makes of each frame of the last stage. At 40 ms per frame a quickly spoken "the" has
    fewer frames than characters, so CTC cannot write it; 2 gives output frames of 20 ms at the cost of 40 ms."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("`stages` must name at least one stage, but is empty")
        check_at_least_one(self, "num_mels")
        if self.head_frames < 1 or self.body_stride % self.head_frames:
            raise ValueError(
                f"`head_frames` must divide the stages' stride, {self.body_stride}, but is {self.head_frames}"
            )

    @property
    def body_stride(self) -> int:
        """The number of feature frames per frame of the last stage."""
        total = 1
        for stage in self.stages:
            total *= stage.stride**stage.blocks
        return total

    @property
    def stride(self) -> int:
        """The number of feature frames per output frame."""
        return self.body_stride // self.head_frames

    @property
    def feature_channels(self) -> int:
        """The number of rows (mel bands) of the input features."""
        return self.num_mels

    def output_frames(self, frames: int) -> int:
        """Return the number of output frames of a clip with `frames` feature frames."""
        return -(-frames // self.stride)

    @property
    def num_stages(self) -> int:
        """The number of stages, each of which can be frozen or have its own learning rate (the head is not counted)."""
        return len(self.stages)

    def stage_of(self, name: str) -> int:
        """Return the index in `stages` of the parameter or module `name`; the head's is one past the last stage."""
        match = re.match(r"blocks\.(\d+)", name)
        if match is None:
            return len(self.stages)
        return [i for i, stage in enumerate(self.stages) for _ in range(stage.blocks)][int(match[1])]

    @property
    def reaches(self) -> list[int]:
        """The number of feature frames that each block's convolutions see on either side, one entry per block."""
        reaches, rate = [], 1
        for stage in self.stages:
            for _ in range(stage.blocks):
                coarsest = rate * stage.stride if stage.repeat > 1 else rate  # only the first sub-block has the stride
                reaches.append(stage.kernel // 2 * stage.dilation * coarsest)
                rate *= stage.stride
        return reaches

    def blocks(self) -> list[tuple[int, StageConfig]]:
        """Return the input channels and the stage of every block, in order."""
        stages = [stage for stage in self.stages for _ in range(stage.blocks)]
        channels = [self.num_mels, *(stage.filters for stage in stages)]
        return list(zip(channels, stages, strict=False))


class SubBlock(nn.Module):
    """Depthwise and pointwise (or one full) convolution, then batch norm. :class:`Block` applies the activation."""

    def __init__(self, in_channels: int, stage: StageConfig, stride: int) -> None:
        super().__init__()
        self.stride = stride
        kernel, dilation = stage.kernel, stage.dilation
        self.depthwise: MaskedConv | None = None
        if stage.separable:
            self.depthwise = MaskedConv(
                in_channels, in_channels, kernel, stride=stride, dilation=dilation, groups=in_channels
            )
            self.pointwise = MaskedConv(in_channels, stage.filters, 1)
        else:
            self.pointwise = MaskedConv(in_channels, stage.filters, kernel, stride=stride, dilation=dilation)
        self.norm = MaskedBatchNorm(stage.filters)

    def forward(self, x: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """Return the result and its mask for `x` [batch, in_channels, 1, frames], whose padding must be zero."""
        if self.depthwise is not None:
            x = self.depthwise(x)
        x = self.pointwise(x)
        if self.stride > 1:
            mask = mask.strided(self.stride)
        return self.norm(x, mask), mask


class Projection(nn.Module):
    """A 1x1 convolution and batch norm, which bring an earlier block's input to the width of a residual sum."""

    def __init__(self, in_channels: int, filters: int) -> None:
        super().__init__()
        self.conv = MaskedConv(in_channels, filters, 1)
        self.norm = MaskedBatchNorm(filters)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Project `x` [batch, in_channels, 1, frames], whose padding must be zero, to `filters` channels."""
        projected: Tensor = self.norm(self.conv(x), mask)
        return projected


class Block(nn.Module):
    """`repeat` sub-blocks and, if the stage is residual, a projection of the input added before the last ReLU.

    Args:
        in_channels: number of channels of the block's input.
        stage: configuration of the sub-blocks.
        earlier: numbers of channels of earlier blocks' inputs, which are projected and added too (dense residual).
    """

    recompute = False
    """Whether the backward pass runs the forward pass again instead of keeping its activations in memory."""

    def __init__(self, in_channels: int, stage: StageConfig, earlier: Sequence[int] = ()) -> None:
        super().__init__()
        self.dropout = stage.dropout
        channels = [in_channels] + [stage.filters] * (stage.repeat - 1)
        self.sub_blocks = nn.ModuleList(
            SubBlock(size, stage, stage.stride if i == 0 else 1) for i, size in enumerate(channels)
        )
        self.projection = MaskedConv(in_channels, stage.filters, 1) if stage.residual else None
        self.projection_norm = MaskedBatchNorm(stage.filters) if stage.residual else None
        self.earlier = nn.ModuleList(Projection(size, stage.filters) for size in earlier)

    def forward(self, x: Tensor, mask: Mask, earlier: Sequence[Tensor] = ()) -> tuple[Tensor, Mask]:
        """Return the block's result [batch, filters, 1, frames'] and its mask.

        Args:
            x: [batch, in_channels, 1, frames], zero in its padding.
            mask: the frames of `x` that belong to a clip.
            earlier: inputs of earlier blocks, in the order of the constructor's `earlier`.
        """
        if self.recompute and torch.is_grad_enabled():
            contexts = nullcontext(), self._repeating()
            inputs = x, mask, tuple(earlier)  # a copy: the caller's list grows before the block runs again
            out: tuple[Tensor, Mask] = checkpoint(self._run, *inputs, use_reentrant=False, context_fn=lambda: contexts)
            return out
        return self._run(x, mask, earlier)

    def _run(self, x: Tensor, mask: Mask, earlier: Sequence[Tensor]) -> tuple[Tensor, Mask]:
        block_input = x
        for i, sub_block in enumerate(self.sub_blocks):
            if i > 0:
                x = dropout(F.relu(x), self.dropout, self.training)
            x, mask = sub_block(x, mask)
        if self.projection is not None and self.projection_norm is not None:
            x = x + self.projection_norm(self.projection(block_input), mask)
        for projection, earlier_input in zip(self.earlier, earlier, strict=True):
            x = x + projection(earlier_input, mask)
        return dropout(F.relu(x), self.dropout, self.training), mask

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Stop updates of the running statistics while a forward pass is repeated, so that no frame counts twice."""
        norms = [module for module in self.modules() if isinstance(module, MaskedBatchNorm)]
        for norm in norms:
            norm.remembers = False
        try:
            yield
        finally:
            for norm in norms:
                norm.remembers = True


def initialise(module: nn.Module) -> None:
    """Initialise a convolution as NVIDIA's recipes do (Xavier uniform, bias 0); leave other modules unchanged."""
    if isinstance(module, MaskedConv):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
