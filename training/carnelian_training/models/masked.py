"""Building blocks whose result for a clip never depends on the padding after it.

Everything works on [batch, channels, 1, frames]: ONNX Runtime's and oneDNN's kernels for 2-D convolutions of height 1
are several times faster than those for 1-D convolutions, above all with channels last.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.depthwise import convolve_depthwise, runs_on
from carnelian_training.models.shared_norm import shared_batch_norm

FOLD = 16
"""PyTorch 2.13 on one thread gives a 1x1 convolution in float32 to oneDNN from this batch on (`use_mkldnn` in its
Convolution.cpp), and else to a matrix product that is half as fast on processors not made by Intel. So time is folded
into the batch, where it divides by this."""


class Mask:
    """Which frames of a batch belong to a clip.

    Args:
        valid: [batch, 1, 1, frames] bool.
    """

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self._rows: tuple[Tensor | None] | None = None

    @classmethod
    def from_lengths(cls, lengths: Tensor, frames: int) -> "Mask":
        """Clips of `lengths` [batch], each at the start of its row of `frames`."""
        return cls((torch.arange(frames, device=lengths.device) < lengths[:, None])[:, None, None, :])

    def apply(self, x: Tensor) -> Tensor:
        """Zero the padding of `x` [batch, channels, 1, frames]. NaN in the padding goes too, so no product."""
        return torch.where(self.valid, x, torch.zeros((), dtype=x.dtype, device=x.device))

    @property
    def rows(self) -> Tensor | None:
        """Which of the batch * frames rows are a clip's, [rows] int64 in order; None if all are."""
        if self._rows is None:  # no `cached_property`: below Python 3.12 its lock ends what `torch.compile` can take in
            rows = self.valid.flatten().nonzero().squeeze(1)
            self._rows = (None if len(rows) == self.valid.numel() else rows,)
        return self._rows[0]

    def strided(self, stride: int) -> "Mask":
        """The mask after a "same" convolution with this stride; every clip must start at a multiple of it."""
        return Mask(self.valid[..., ::stride])


class MaskedConv(nn.Conv2d):
    """A convolution over time of a batch whose padding is zero; the padding of its result is not."""

    uses_triton = False
    """Whether depthwise convolutions of stride 1 are those of `depthwise_gpu.py`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            (1, kernel),
            stride=(1, stride),
            dilation=(1, dilation),
            padding=(0, dilation * (kernel - 1) // 2),
            groups=groups,
            bias=bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `x` [batch, channels, 1, frames]."""
        dilation = self.dilation[1]
        trains_on_cpu = self.training and x.device.type == "cpu"
        is_depthwise = self.groups == self.in_channels == self.out_channels and self.bias is None
        is_ours = is_depthwise and (trains_on_cpu or (self.uses_triton and self.stride[1] == 1))
        if dilation == 1:
            is_pointwise = self.kernel_size[1] == self.stride[1] == 1
            # TorchInductor (2.13) fails on views of sizes that it does not know.
            may_fold = trains_on_cpu and is_pointwise and not torch.compiler.is_compiling()
            if may_fold and 0 < x.shape[0] < FOLD and x.shape[3] % FOLD == 0:
                # [B, C, 1, T] -> [16 B, C, 1, T / 16] and back: views with channels last
                return _refold(super().forward(_refold(x, FOLD * x.shape[0])), x.shape[0])
            if is_ours:
                return self._convolve_depthwise(x)
            return super().forward(x)
        # A dilated convolution over time is a plain one over each of `dilation` interleaved sequences. Folding time
        # into two axes, a view with channels last, avoids oneDNN's slow path: 12 times on QuartzNet's k87 layer.
        batch, channels, _, frames = x.shape
        x = F.pad(x, (0, -frames % dilation))
        if is_ours:
            # [B, C, 1, T] -> [B, d, C, T / d] -> [B * d, C, 1, T / d]
            x = x.reshape(batch, channels, -1, dilation).permute(0, 3, 1, 2).flatten(0, 1).unsqueeze(2)
            x = self._convolve_depthwise(x.to(memory_format=torch.channels_last))
            x = x.reshape(batch, dilation, self.out_channels, -1).permute(0, 2, 3, 1)
            return x.reshape(batch, self.out_channels, 1, -1)[..., :frames]
        # [B, C, 1, T] -> [B, C, T / d, d]
        x = x.reshape(batch, channels, -1, dilation)
        padding = (self.weight.shape[3] // 2, 0)
        x = F.conv2d(x, self.weight.transpose(2, 3), self.bias, (1, 1), padding, (1, 1), self.groups)
        return x.reshape(x.shape[0], x.shape[1], 1, -1)[..., :frames]

    def _convolve_depthwise(self, x: Tensor) -> Tensor:
        if self.uses_triton and self.stride[1] == 1:
            from carnelian_training.models import depthwise_gpu  # Triton comes with PyTorch's CUDA build alone

            return depthwise_gpu.convolve_depthwise(x, self.weight)
        return convolve_depthwise(x, self.weight, self.stride[1])


def use_gpu_kernels(network: nn.Module, device: torch.device) -> list[MaskedConv]:
    """Let the kernels of `depthwise_gpu.py` compute depthwise convolutions, where they run on a GPU.

    Returns:
        Those convolutions; none where the kernels do not run, which a warning says.
    """
    depthwise = [module for module in network.modules() if isinstance(module, MaskedConv) and module.groups > 1]
    if not depthwise or not runs_on(device):
        return []
    for conv in depthwise:
        conv.uses_triton = True
    return depthwise


def _refold(x: Tensor, batch: int) -> Tensor:
    """Cut the rows of `x` [batch', channels, 1, frames'] anew, one after the other, into `batch` rows."""
    return x.permute(0, 2, 3, 1).reshape(batch, 1, -1, x.shape[1]).permute(0, 3, 1, 2)


def strided(lengths: Tensor, stride: int) -> Tensor:
    """Frames that a "same" convolution with an odd kernel leaves of `lengths` frames: ceil(lengths / stride)."""
    return (lengths + stride - 1) // stride


class MaskedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose statistics see real frames only; the padding of its result is zero.

    Constants as in NVIDIA's Jasper and QuartzNet: eps 1e-3, momentum 0.1.
    """

    shared = False
    """Whether the statistics are over the frames of all processes, which then have to take part."""
    remembers = True
    """Whether the running statistics follow: not where a forward pass is only repeated."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.1)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:  # type: ignore[override]
        """Normalise `x` [batch, channels, 1, frames]."""
        if not self.training:
            return mask.apply(super().forward(x))
        # [B, C, 1, T] -> [B * T, C]: a view with channels last; then the real frames alone, and back
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        normalised = self._normalise(rows if mask.rows is None else rows.index_select(0, mask.rows))
        if mask.rows is not None:
            # In place on zeros: the function `index_copy` would copy them first.
            normalised = normalised.new_zeros(rows.shape).index_copy_(0, mask.rows, normalised)
        return normalised.view(x.shape[0], 1, x.shape[3], x.shape[1]).permute(0, 3, 1, 2)

    def _normalise(self, rows: Tensor) -> Tensor:
        """Normalise `rows` [frames, channels] by their own statistics, or those of all processes' rows."""
        momentum = self.momentum if self.remembers and self.momentum else 0.0
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        if self.shared:
            return shared_batch_norm(rows, self.weight, self.bias, mean, variance, momentum, self.eps)
        # A process without clips, or next to none, has no statistics. `>` would give `torch.compile` no bool.
        enough = len(rows) not in (0, 1)
        return F.batch_norm(rows, mean, variance, self.weight, self.bias, enough, momentum, self.eps)
