"""Building blocks whose result for a clip never depends on the padding after it.

The modules work on [batch, channels, 1, frames]: ONNX Runtime's and oneDNN's kernels for 2-D convolutions of height 1
are several times faster than those for 1-D convolutions, above all with channels last.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.depthwise import convolve_depthwise, runs_on
from carnelian_training.models.shared_norm import shared_batch_norm

FOLD = 16
"""The batch size from which PyTorch 2.13 on one thread gives a 1x1 convolution in float32 to oneDNN (`use_mkldnn` in
its Convolution.cpp). A smaller batch goes to a matrix product that is half as fast on processors not made by Intel. So
smaller batches fold time into the batch if the number of frames is a multiple of this."""


def frames_within(lengths: Tensor, frames: int) -> Tensor:
    """Return the mask of a clip's own frames, [batch, frames] bool, from `lengths` [batch]."""
    return torch.arange(frames, device=lengths.device) < lengths[:, None]


def zero_unless(valid: Tensor, x: Tensor) -> Tensor:
    """Zero `x` where the mask `valid`, which broadcasts to it, is False; even NaN, which times zero would stay NaN."""
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))


class Mask:
    """The frames of a batch that belong to a clip; the others are padding.

    Args:
        valid: [batch, 1, 1, frames] bool, True for the frames of a clip.
    """

    def __init__(self, valid: Tensor) -> None:
        self.valid = valid
        self._rows: tuple[Tensor | None] | None = None

    @classmethod
    def from_lengths(cls, lengths: Tensor, frames: int) -> "Mask":
        """Return the mask of clips of `lengths` [batch] frames, each at the start of its row of `frames` frames."""
        return cls(frames_within(lengths, frames)[:, None, None, :])

    def apply(self, x: Tensor) -> Tensor:
        """Zero the padding of `x` [batch, channels, 1, frames], NaN included."""
        return zero_unless(self.valid, x)

    @property
    def rows(self) -> Tensor | None:
        """The indices of clip frames among the batch * frames rows, [rows] int64 in order; None if every row is one."""
        if self._rows is None:  # not `cached_property`: before Python 3.12 its lock breaks the graph of `torch.compile`
            rows = self.valid.flatten().nonzero().squeeze(1)
            self._rows = (None if len(rows) == self.valid.numel() else rows,)
        return self._rows[0]

    def strided(self, stride: int) -> "Mask":
        """Return the mask after a "same" convolution with `stride`; every clip must start at a multiple of `stride`."""
        return Mask(self.valid[..., ::stride])


class MaskedConv(nn.Conv2d):
    """A convolution over time for a batch whose padding is zero. The padding of its result is not zero."""

    uses_triton = False
    """Whether `depthwise_gpu.py` computes the convolution, if it is depthwise and has stride 1."""

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
        """Convolve `x` [batch, in_channels, 1, frames], zero in its padding, to [batch, out_channels, 1, frames']."""
        dilation = self.dilation[1]
        trains_on_cpu = self.training and x.device.type == "cpu"
        is_depthwise = self.groups == self.in_channels == self.out_channels and self.bias is None
        is_ours = is_depthwise and (trains_on_cpu or (self.uses_triton and self.stride[1] == 1))
        if dilation == 1:
            is_pointwise = self.groups == self.kernel_size[1] == self.stride[1] == 1
            # TorchInductor (2.13) fails on views whose sizes it does not know.
            if trains_on_cpu and is_pointwise and not torch.compiler.is_compiling():
                if _uses_bfloat16():
                    # oneDNN's matrix product in bfloat16 is never slower than its 1x1 convolution; with AMX, up to ten
                    # times as fast. [B, C, 1, T] -> [B, 1, T, C'] -> [B, C', 1, T]: views if `x` is channels last
                    return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
                if 0 < x.shape[0] < FOLD and x.shape[3] % FOLD == 0:
                    # [B, C, 1, T] -> [16 B, C, 1, T / 16] and back: views if `x` is channels last
                    return _refold(super().forward(_refold(x, FOLD * x.shape[0])), x.shape[0])
            if is_ours:
                return self._convolve_depthwise(x)
            return super().forward(x)
        # A dilated convolution over time is a plain one over each of `dilation` interleaved sequences. Folding time
        # into two axes (a view with channels last) avoids oneDNN's slow path: 12 times faster on QuartzNet's k87 layer.
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
            from carnelian_training.models import depthwise_gpu  # only PyTorch's CUDA build has Triton

            return depthwise_gpu.convolve_depthwise(x, self.weight)
        return convolve_depthwise(x, self.weight, self.stride[1])


def use_gpu_kernels(network: nn.Module, device: torch.device) -> list[MaskedConv]:
    """Let the kernels of `depthwise_gpu.py` compute the network's depthwise convolutions, if they run on `device`.

    Returns:
        The depthwise convolutions; none if the kernels do not run, which is logged as a warning.
    """
    depthwise = [module for module in network.modules() if isinstance(module, MaskedConv) and module.groups > 1]
    if not depthwise or not runs_on(device):
        return []
    for conv in depthwise:
        conv.uses_triton = True
    return depthwise


def _uses_bfloat16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _refold(x: Tensor, batch: int) -> Tensor:
    """Join the rows of `x` [batch', channels, 1, frames'] in order, and cut them into `batch` rows of equal length."""
    return x.permute(0, 2, 3, 1).reshape(batch, 1, -1, x.shape[1]).permute(0, 3, 1, 2)


def strided(lengths: Tensor, stride: int) -> Tensor:
    """Return the frames after a "same" convolution with an odd kernel: ceil(lengths / stride)."""
    return (lengths + stride - 1) // stride


class MaskedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation with statistics over real frames only; the padding of its result is zero.

    The constants are those of NVIDIA's Jasper and QuartzNet: eps 1e-3, momentum 0.1.
    """

    shared = False
    """Whether the statistics are over the frames of all processes; all of them then have to run this module."""
    remembers = True
    """Whether a training pass updates the running statistics; False while a forward pass is only repeated."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.1)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:  # type: ignore[override]
        """Normalise the channels of `x` [batch, channels, 1, frames], and zero its padding."""
        if not self.training:
            return mask.apply(super().forward(x))
        # [B, C, 1, T] -> [B * T, C]: a view if `x` is channels last; then only the real frames, and back
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        normalised = self._normalise(rows if mask.rows is None else rows.index_select(0, mask.rows))
        if mask.rows is not None:
            # In place on the zeros, because `index_copy` would copy them first.
            normalised = normalised.new_zeros(rows.shape).index_copy_(0, mask.rows, normalised)
        return normalised.view(x.shape[0], 1, x.shape[3], x.shape[1]).permute(0, 3, 1, 2)

    def _normalise(self, rows: Tensor) -> Tensor:
        """Normalise `rows` [frames, channels] by their own statistics, or by those of all processes' rows."""
        momentum = self.momentum if self.remembers and self.momentum else 0.0
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        if self.shared:
            return shared_batch_norm(rows, self.weight, self.bias, mean, variance, momentum, self.eps)
        # A variance needs two rows; with fewer, the running statistics are used. Not `len(rows) > 1`, which is no
        # bool under `torch.compile`.
        enough = len(rows) not in (0, 1)
        return F.batch_norm(rows, mean, variance, self.weight, self.bias, enough, momentum, self.eps)
