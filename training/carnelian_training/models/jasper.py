"""Jasper with dense residual: B blocks of R full convolutions (Li et al. 2019, https://arxiv.org/abs/1904.03288).

Every residual block adds projections of its own input and of all earlier residual blocks' inputs to the output of its
last batch norm, as the released code does.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from carnelian_training.models.blocks import Block, StackConfig, StageConfig
from carnelian_training.models.masked import Mask
from carnelian_training.models.network import StackNetwork


@dataclass(frozen=True, kw_only=True)
class JasperStageConfig(StageConfig):
    """A stage whose convolutions are full unless `separable` is set."""

    separable: bool = False


@dataclass(frozen=True, kw_only=True)
class JasperConfig(StackConfig):
    """The configuration of any B x R Jasper."""

    name: Literal["jasper"] = "jasper"
    stages: tuple[JasperStageConfig, ...]
    dense: bool = True
    """Whether each residual block adds the inputs of all earlier residual blocks, not only its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        residual = "".join("r" if stage.residual else " " for stage in self.stages)
        if self.dense and " " in residual.strip():
            raise ValueError(
                "`stages` must have their residual ones in a row if it is `dense`, but others come between"
            )


class Jasper(StackNetwork):
    """A Jasper network. The 10x5 dense residual one with 29 labels has 332,632,349 parameters."""

    config: JasperConfig

    def __init__(self, config: JasperConfig, num_labels: int) -> None:
        blocks = nn.ModuleList()
        earlier: list[int] = []
        for size, stage in config.blocks():
            is_dense = stage.residual and config.dense
            blocks.append(Block(size, stage, earlier if is_dense else ()))
            if is_dense:
                earlier.append(size)
        super().__init__(config, blocks, num_labels)

    def encode(self, x: Tensor, mask: Mask) -> Tensor:
        """Run the blocks: [batch, mels, 1, frames], zero in the padding -> [batch, channels, 1, frames'']."""
        inputs: list[Tensor] = []
        for block in self.blocks:
            if block.projection is None or not self.config.dense:
                x, mask = block(x, mask)
                continue
            block_input = x
            x, mask = block(x, mask, inputs)
            inputs.append(block_input)
        return x
