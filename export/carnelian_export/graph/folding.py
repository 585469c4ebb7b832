"""Prepare Jasper and QuartzNet for inference: fold batch norms into convolutions, and mask only where it matters.

A batch norm in evaluation is a scale and a shift, which the convolution before it can do. Only convolutions over
several frames look at a clip's neighbours, so only their inputs need zeros in the gaps. ReLU and the residual sum then
come right after a convolution, and runtimes fuse them with it.
"""

import copy
from typing import cast

from carnelian_training.models.blocks import Block, Projection, SubBlock
from carnelian_training.models.masked import Mask, MaskedBatchNorm, MaskedConv
from carnelian_training.models.network import StackNetwork
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


class FoldedSubBlock(nn.Module):
    """A sub-block whose batch norm is folded into its convolution; its output is not zero in the padding.

    Args:
        sub_block: In evaluation mode; its convolutions become this module's.
    """

    def __init__(self, sub_block: SubBlock) -> None:
        super().__init__()
        self.stride = sub_block.stride
        self.depthwise = sub_block.depthwise
        self.pointwise = fold(sub_block.pointwise, sub_block.norm)

    def forward(self, x: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """Transform `x` [batch, in_channels, 1, frames], whose padding may have any values."""
        for conv in (self.depthwise, self.pointwise):
            if conv is not None:
                x = conv(mask.apply(x) if conv.kernel_size[1] > 1 else x)
                if conv.stride[1] > 1:
                    mask = mask.strided(self.stride)
        return x, mask


class Folded(nn.Module):
    """A placeholder for a batch norm that has been folded into its convolution."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Return `x` unchanged."""
        return x


def fold(conv: MaskedConv, norm: MaskedBatchNorm) -> MaskedConv:
    """Fold a batch norm (in evaluation) into the convolution before it, which is changed in place and returned."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    conv.weight, conv.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    return conv


def fold_batch_norms(network: StackNetwork) -> StackNetwork:
    """Return a copy of a network with its batch norms folded; results are the same up to float32 rounding."""
    network = copy.deepcopy(network).eval()
    for module in list(network.modules()):
        if isinstance(module, Block):
            for i, sub_block in enumerate(module.sub_blocks):
                module.sub_blocks[i] = FoldedSubBlock(cast(SubBlock, sub_block))
            _fold_in_place(module, "projection", "projection_norm")
        elif isinstance(module, Projection):
            _fold_in_place(module, "conv", "norm")
    return network


def _fold_in_place(module: nn.Module, conv_name: str, norm_name: str) -> None:
    conv, norm = getattr(module, conv_name), getattr(module, norm_name)
    if conv is not None:
        setattr(module, conv_name, fold(conv, norm))
        setattr(module, norm_name, Folded())
