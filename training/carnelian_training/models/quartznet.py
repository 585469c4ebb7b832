"""QuartzNet: B blocks of R time-channel separable convolutions (Kriman et al. 2019, https://arxiv.org/abs/1910.10261).

Differences from the paper's text, as in its released code: the last layer before the head is a plain 1x1 convolution,
and ReLU and dropout come after the residual sum in the last sub-block of a block.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from carnelian_training.models.blocks import Block, StackConfig
from carnelian_training.models.masked import Mask
from carnelian_training.models.network import StackNetwork


@dataclass(frozen=True, kw_only=True)
class QuartzNetConfig(StackConfig):
    """The configuration of any B x R QuartzNet."""

    name: Literal["quartznet"] = "quartznet"


class QuartzNet(StackNetwork):
    """A QuartzNet network. The 15x5 one with 29 labels has 18,924,381 parameters."""

    def __init__(self, config: QuartzNetConfig, num_labels: int) -> None:
        super().__init__(config, nn.ModuleList(Block(size, stage) for size, stage in config.blocks()), num_labels)

    def encode(self, x: Tensor, mask: Mask) -> Tensor:
        """Run the blocks: [batch, mels, 1, frames], zero in the padding -> [batch, channels, 1, frames'']."""
        for block in self.blocks:
            x, mask = block(x, mask)
        return x
