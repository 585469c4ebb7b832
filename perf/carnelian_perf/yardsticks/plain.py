"""QuartzNet in its usual PyTorch form, `Conv1d` over [batch, channels, frames]: the baseline of benchmarks.

It is a fair baseline: the same parameters by the same names, the same masks, batch statistics over real frames alone,
the same loss to float32 rounding; only the form is that of the DeepLearningExamples and NeMo code. A test compares its
outputs and gradients with those of `carnelian_training.models.quartznet`.
"""

import torch
from carnelian_training.models.blocks import StackConfig, StageConfig
from carnelian_training.models.quartznet import QuartzNet
from torch import Tensor, nn
from torch.nn import functional as F


def same_conv1d(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv1d:
    """A "same" convolution of a batch whose padding is zero."""
    padding = dilation * (kernel - 1) // 2
    return nn.Conv1d(in_channels, out_channels, kernel, stride, padding, dilation, groups, bias=False)


class MaskedBatchNorm1d(nn.BatchNorm1d):
    """Batch normalisation of [batch, channels, frames] whose statistics see real frames only."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        """Normalise the frames of `mask` [batch, frames] bool, None if all are real; the others become zero."""
        if mask is None:
            return super().forward(x)
        rows = x.transpose(1, 2)
        full = torch.zeros_like(rows)
        full[mask] = super().forward(rows[mask])
        return full.transpose(1, 2)


class PlainSubBlock(nn.Module):
    """The plain form of :class:`carnelian_training.models.blocks.SubBlock`."""

    def __init__(self, in_channels: int, stage: StageConfig, stride: int) -> None:
        super().__init__()
        self.stride = stride
        kernel, dilation = stage.kernel, stage.dilation
        self.depthwise: nn.Conv1d | None = None
        if stage.separable:
            self.depthwise = same_conv1d(in_channels, in_channels, kernel, stride, dilation, groups=in_channels)
            self.pointwise = same_conv1d(in_channels, stage.filters, 1)
        else:
            self.pointwise = same_conv1d(in_channels, stage.filters, kernel, stride, dilation)
        self.norm = MaskedBatchNorm1d(stage.filters)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Transform `x` [batch, in_channels, frames]."""
        if self.depthwise is not None:
            x = self.depthwise(x)
        x = self.pointwise(x)
        if self.stride > 1 and mask is not None:
            mask = mask[:, :: self.stride]
        return self.norm(x, mask), mask


class PlainBlock(nn.Module):
    """The plain form of :class:`carnelian_training.models.blocks.Block`."""

    def __init__(self, in_channels: int, stage: StageConfig) -> None:
        super().__init__()
        self.dropout = stage.dropout
        channels = [in_channels] + [stage.filters] * (stage.repeat - 1)
        self.sub_blocks = nn.ModuleList(
            PlainSubBlock(size, stage, stage.stride if i == 0 else 1) for i, size in enumerate(channels)
        )
        self.projection = same_conv1d(in_channels, stage.filters, 1) if stage.residual else None
        self.projection_norm = MaskedBatchNorm1d(stage.filters) if stage.residual else None

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Transform `x` [batch, in_channels, frames], zero in its padding."""
        block_input = x
        for i, sub_block in enumerate(self.sub_blocks):
            if i > 0:
                x = F.dropout(F.relu(x), self.dropout, self.training)
            x, mask = sub_block(x, mask)
        if self.projection is not None and self.projection_norm is not None:
            x = x + self.projection_norm(self.projection(block_input), mask)
        return F.dropout(F.relu(x), self.dropout, self.training), mask


class PlainQuartzNet(nn.Module):
    """The plain form of `QuartzNet`: the same parameters by the same names, without the axis of height 1."""

    def __init__(self, config: StackConfig, num_labels: int) -> None:
        super().__init__()
        self.config = config
        blocks = []
        channels: int = config.num_mels
        for stage in config.stages:
            for _ in range(stage.blocks):
                blocks.append(PlainBlock(channels, stage))
                channels = stage.filters
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Conv1d(channels, num_labels * config.head_frames, 1)

    @classmethod
    def of(cls, network: QuartzNet) -> "PlainQuartzNet":
        """Convert a QuartzNet to this form, with the same weights, on the CPU."""
        plain = cls(network.config, network.head.out_channels // network.config.head_frames)
        plain.load_state_dict({name: w.squeeze(2) if w.ndim == 4 else w for name, w in network.state_dict().items()})
        return plain

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities [batch, frames', labels] and their lengths from features [batch, mels, frames]."""
        real = torch.arange(features.shape[2], device=lengths.device) < lengths[:, None]
        x = features.masked_fill(~real[:, None, :], 0.0)
        mask = None if bool(real.all()) else real
        for block in self.blocks:
            x, mask = block(x, mask)
        logits = self.head(x).transpose(1, 2)
        logits = logits.reshape(logits.shape[0], -1, logits.shape[2] // self.config.head_frames)
        return F.log_softmax(logits.float(), dim=2), (lengths + self.config.stride - 1) // self.config.stride
