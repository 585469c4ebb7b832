"""Clips kept apart on one time axis in the form that ONNX Runtime's float32 kernels on CPUs are fastest with.

Gaps have to be zero before every convolution over several frames. A `Where` after each convolution does that on one
thread, and takes tensors out of the blocked layout of the convolutions and back. Here a huge negative number is added
in the gaps, of which ReLU makes zero. The runtime does both inside the convolution, if it can tell that the summands
have one shape. It knows that of what convolutions and concatenations along the channels make of the result of one
convolution; so that is where the numbers come from.
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
"""No features are beyond this: normalised ones are at most the root of their number of frames, 78 in 60 s, and
logarithms of float32 less than that. Activations that become infinite would pass the gaps; exports are compared with
a neighbour at this level."""
SILENCE = -3e38
"""Near the lowest of float32: no activation added to it is above zero. Infinite in float16, so for float32 alone."""
GAP_CHANNELS = 16
"""One block of the runtime's layout with AVX-512, two with AVX2 (`MlasNchwcGetBlockSize`)."""


class Gaps(Mask):
    """A mask that is applied to the features first, and after that only to what goes through ReLU next.

    So it is for networks of :func:`silence_once`, not for those of `folding.py`, which mask what a convolution takes.

    Args:
        valid: [1, 1, 1, frames] bool.
    """

    def __init__(self, valid: Tensor) -> None:
        super().__init__(valid)
        self._gaps: Tensor | None = None  # [1, GAP_CHANNELS, 1, frames], one in the gaps
        self._silences: dict[int, Tensor] = {}  # [1, channels, 1, frames], by channels

    def apply(self, x: Tensor) -> Tensor:
        """Features [1, num_mels, 1, frames], zero in the gaps, as they are; of anything else its sum with silence."""
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
        """The mask after a "same" convolution with this stride; every clip must start at a multiple of it."""
        assert self._gaps is not None
        mask = Gaps(super().strided(stride).valid)
        mask._gaps = F.conv2d(self._gaps, _constant(np.eye(GAP_CHANNELS)), stride=(1, stride))
        return mask


def _constant(weight: npt.NDArray[np.float64]) -> Tensor:
    """The weight [out, in] of a 1x1 convolution, a constant of the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # that it is a constant
        return torch.from_numpy(weight.astype(np.float32)[:, :, None, None])


class UnmaskedNorm(MaskedBatchNorm):
    """A batch norm in evaluation whose result is added to one that has silence in the gaps."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:  # type: ignore[override]
        """Normalise `x` [batch, channels, 1, frames], whatever is in its gaps."""
        return nn.BatchNorm2d.forward(self, x)


def silence_once(network: StackNetwork) -> StackNetwork:
    """A copy in which only one of the summands of a residual sum has its gaps masked."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, Block) and module.projection_norm is not None:
            module.projection_norm.__class__ = UnmaskedNorm
        elif isinstance(module, Projection):
            module.norm.__class__ = UnmaskedNorm
    return network
