"""Keep clips apart on one time axis in the form that is fastest with ONNX Runtime's float32 kernels on CPUs.

Gaps must be zero before every convolution over several frames. A `Where` after each convolution does that on one
thread, and takes tensors out of the blocked layout of the convolutions and back. Here a huge negative number is added
in the gaps, which ReLU turns into zero. The runtime does both inside the convolution if it can tell that the two
summands have the same shape. It can tell if both come from the result of one convolution, through convolutions and
concatenations along the channels only. So the numbers to add are computed in that way.
"""

import copy
import warnings

import numpy as np
import numpy.typing as npt
import torch
from carnelian_training.models.blocks import Block, Projection
from carnelian_training.models.masked import Mask, MaskedBatchNorm
from carnelian_training.models.network import StackNetwork
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]
from torch.nn import functional as F

LOUDEST = 1e3
"""The largest magnitude of usable features. Normalised features are at most the square root of their number of frames,
78 in 60 s, and logarithms of float32 numbers are below the limit too. Activations that become infinite would pass the
gaps. Exports are compared with the network on a clip beside a neighbour at this level."""
SILENCE = -3e38
"""The number that is added in the gaps, near the lowest of float32: its sum with an activation is never above zero. It
would be infinite in float16, so this module is for float32 only."""
GAP_CHANNELS = 16
"""The channels of the tensor that marks the gaps: one block of ONNX Runtime's layout with AVX-512, two with AVX2
(`MlasNchwcGetBlockSize`)."""


class Gaps(Mask):
    """A mask that is applied to the features first, and after that only to inputs of ReLU.

    So it is for networks of :func:`silence_once`, not for those of `folding.py`, which mask the inputs of convolutions.

    Args:
        valid: [1, 1, 1, frames] bool, False in the gaps.
    """

    def __init__(self, valid: Tensor) -> None:
        super().__init__(valid)
        self._gaps: Tensor | None = None  # [1, GAP_CHANNELS, 1, frames], one in the gaps
        self._silences: dict[int, Tensor] = {}  # [1, channels, 1, frames], by channels

    def apply(self, x: Tensor) -> Tensor:
        """Add :data:`SILENCE` to `x` [1, channels, 1, frames] in the gaps.

        The first `x` must be the features, which are zero in the gaps: they are returned as they are.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TracerWarning)  # the number of channels is constant
            channels = int(x.shape[1])
        if self._gaps is None:
            x = F.conv2d(x, _constant(np.ones((channels, 1))), groups=channels)
            gaps = torch.where(self.valid, torch.zeros(()), torch.ones(()))
            gaps = F.conv2d(gaps, _constant(np.ones((GAP_CHANNELS, 1))))
            only_gaps = np.eye(GAP_CHANNELS, channels + GAP_CHANNELS, channels)
            self._gaps = F.conv2d(torch.cat([x, gaps], 1), _constant(only_gaps))
            return x
        if channels not in self._silences:
            first_gap_channel = np.full((channels, 1), SILENCE) * np.eye(1, GAP_CHANNELS)
            self._silences[channels] = F.conv2d(self._gaps, _constant(first_gap_channel))
        return x + self._silences[channels]

    def strided(self, stride: int) -> "Gaps":
        """Return the mask after a "same" convolution with this stride; every clip must start at a multiple of it."""
        assert self._gaps is not None
        mask = Gaps(super().strided(stride).valid)
        mask._gaps = F.conv2d(self._gaps, _constant(np.eye(GAP_CHANNELS)), stride=(1, stride))
        return mask


def _constant(weight: npt.NDArray[np.float64]) -> Tensor:
    """Return the weight [out, in, 1, 1] of a 1x1 convolution, from [out, in], as a constant of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # it warns that this is a constant
        return torch.from_numpy(weight.astype(np.float32)[:, :, None, None])


class UnmaskedNorm(MaskedBatchNorm):
    """A batch norm in evaluation without a mask: its result is added to a tensor that has silence in the gaps."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:  # type: ignore[override]
        """Normalise `x` [batch, channels, 1, frames], whose gaps may have any values."""
        return nn.BatchNorm2d.forward(self, x)


def silence_once(network: StackNetwork) -> StackNetwork:
    """Return a copy of a network in which only one of the summands of each residual sum is masked."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, Block) and module.projection_norm is not None:
            module.projection_norm.__class__ = UnmaskedNorm
        elif isinstance(module, Projection):
            module.norm.__class__ = UnmaskedNorm
    return network
