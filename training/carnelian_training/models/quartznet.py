"""QuartzNet: B blocks of R time-channel separable convolutions (Kriman et al. 2019, https://arxiv.org/abs/1910.10261).

In: [batch, 64, frames] log-mel features and their lengths. Out: [batch, frames', labels] log-probabilities and theirs.
Differences from the paper's text, as in its released code: the last layer before the head is a plain 1x1 convolution,
and ReLU and dropout come after the residual sum in the last sub-block of a block.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.masked import Mask, MaskedBatchNorm, MaskedConv, strided


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """`blocks` equal blocks in a row, each of `repeat` sub-blocks: convolution, batch norm, ReLU, dropout."""

    filters: int
    kernel: int
    """Odd, in frames of the stage's input."""
    blocks: int = 1
    repeat: int = 1
    stride: int = 1
    """Of the first sub-block of each block."""
    dilation: int = 1
    dropout: float = 0.0
    residual: bool = True
    separable: bool = True

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd, so that output frames stay centred, but is {self.kernel}")
        for name in ("filters", "kernel", "blocks", "repeat", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}")
        if self.residual and self.stride > 1:
            raise ValueError(
                f"a residual block keeps the frame rate: set `residual: false` or `stride: 1` (is {self.stride})"
            )


@dataclass(frozen=True, kw_only=True)
class QuartzNetConfig:
    """Any B x R QuartzNet, stem and head included, as a list of stages."""

    name: Literal["quartznet"] = "quartznet"
    stages: tuple[StageConfig, ...]
    num_mels: Literal[64] = 64
    """What `features.py` makes; stored with the model."""
    head_frames: int = 1
    """Output frames that the head makes of each frame of the last stage. At 40 ms a frame there are fewer frames than
    characters in a quick "the", which CTC then cannot write; 2 gives characters 20 ms at the cost of 40."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("`stages` must name at least one stage, but is empty")
        if self.head_frames < 1 or self.body_stride % self.head_frames:
            raise ValueError(
                f"`head_frames` must divide the stages' stride, {self.body_stride}, but is {self.head_frames}"
            )

    @property
    def body_stride(self) -> int:
        """Feature frames per frame of the last stage."""
        total = 1
        for stage in self.stages:
            total *= stage.stride**stage.blocks
        return total

    @property
    def stride(self) -> int:
        """Feature frames per output frame."""
        return self.body_stride // self.head_frames

    @property
    def reach(self) -> int:
        """How many feature frames the widest single convolution looks to either side."""
        widest, rate = 0, 1
        for stage in self.stages:
            for i in range(stage.blocks * stage.repeat):
                widest = max(widest, stage.kernel // 2 * stage.dilation * rate)
                if i % stage.repeat == 0:
                    rate *= stage.stride
        return widest


class SubBlock(nn.Module):
    """Depthwise and pointwise (or one full) convolution, then batch norm. No activation: see :class:`Block`."""

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
        """Transform `x` [batch, in_channels, 1, frames], zero in its padding."""
        if self.depthwise is not None:
            x = self.depthwise(x)
        x = self.pointwise(x)
        if self.stride > 1:
            mask = mask.strided(self.stride)
        return self.norm(x, mask), mask


class Block(nn.Module):
    """`repeat` sub-blocks and, if the stage is residual, a projection of the input added before the last ReLU."""

    def __init__(self, in_channels: int, stage: StageConfig) -> None:
        super().__init__()
        self.dropout = stage.dropout
        channels = [in_channels] + [stage.filters] * (stage.repeat - 1)
        self.sub_blocks = nn.ModuleList(
            SubBlock(size, stage, stage.stride if i == 0 else 1) for i, size in enumerate(channels)
        )
        self.projection = MaskedConv(in_channels, stage.filters, 1) if stage.residual else None
        self.projection_norm = MaskedBatchNorm(stage.filters) if stage.residual else None

    def forward(self, x: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """Transform `x` [batch, in_channels, 1, frames], zero in its padding, into the same form."""
        block_input = x
        for i, sub_block in enumerate(self.sub_blocks):
            if i > 0:
                x = F.dropout(F.relu(x), self.dropout, self.training)
            x, mask = sub_block(x, mask)
        if self.projection is not None and self.projection_norm is not None:
            x = x + self.projection_norm(self.projection(block_input), mask)
        return F.dropout(F.relu(x), self.dropout, self.training), mask


class QuartzNet(nn.Module):
    """The network of a :class:`QuartzNetConfig`. 15x5 with 29 labels has 18,924,381 parameters."""

    def __init__(self, config: QuartzNetConfig, num_labels: int) -> None:
        super().__init__()
        self.config = config
        blocks = []
        channels: int = config.num_mels
        for stage in config.stages:
            for _ in range(stage.blocks):
                blocks.append(Block(channels, stage))
                channels = stage.filters
        self.blocks = nn.ModuleList(blocks)
        self.head = MaskedConv(channels, num_labels * config.head_frames, 1, bias=True)
        self.apply(_initialise)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every label at every frame.

        Args:
            features: [batch, num_mels, frames] float32.
            lengths: [batch] int64, real frames of each clip.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities and [batch] int64 lengths,
            ``lengths' = ceil(lengths / config.stride)``, whether or not that many frames are there.
        """
        mask = Mask.from_lengths(lengths, features.shape[2])
        # Not -(-a // b): ONNX rounds the quotients of negative integers up.
        log_prob_frames = (features.shape[2] + self.config.stride - 1) // self.config.stride
        log_probs = self.score(features, mask)[:, :log_prob_frames]
        return log_probs, strided(lengths, self.config.stride)

    def score(self, features: Tensor, mask: Mask) -> Tensor:
        """Score every label at every frame, wherever in the rows the clips lie.

        A row may hold several clips if each starts at a multiple of `config.body_stride` and at least `config.reach`
        frames after the one before it. No clip then touches another: the gap is zero before every convolution.

        Args:
            features: [batch, num_mels, frames] float32.
            mask: which frames are a clip's.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities.
        """
        # [B, M, T] -> [B, M, 1, T]
        x = mask.apply(features.unsqueeze(2)).to(memory_format=torch.channels_last)
        for block in self.blocks:
            x, mask = block(x, mask)
        # [B, n V, 1, T''] -> [B, T'', n V] -> [B, n T'', V]
        logits = self.head(x).squeeze(2).transpose(1, 2)
        logits = logits.reshape(logits.shape[0], -1, logits.shape[2] // self.config.head_frames)
        return F.log_softmax(logits.float(), dim=2)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, MaskedConv):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
