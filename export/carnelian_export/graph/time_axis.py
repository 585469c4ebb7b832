"""Choose where the clips of a batch lie on one time axis, with gaps as wide as convolutions look to either side.

Most convolutions of QuartzNet look up to 37 frames to either side, and one of its last looks 86. If all gaps were as
wide as that one needs, eight clips of two seconds would take 1,410 frames, 602 of them in gaps. So clips lie close
together at first, and are moved apart right before the block that looks further.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from carnelian_training.models.blocks import Block
from carnelian_training.models.masked import Mask, strided
from carnelian_training.models.network import StackNetwork
from torch import Tensor, nn

WORTH_MOVING = 0.1
"""The least fraction of the work in gaps that moving clips apart must save, for it is a pass over the activations."""


@dataclass(frozen=True)
class Spacing:
    """The width of the gaps between clips, in feature frames: one before a certain block, and another from it on."""

    near: int
    """The least number of feature frames between two clips before `block`."""
    far: int
    """The least number of feature frames between two clips from `block` on."""
    block: int | None
    """The index of the block before which the clips are moved apart; None if they never are."""


def find_spacing(network: StackNetwork) -> Spacing:
    """Choose the block before which clips are moved apart so that the least work is done in gaps.

    The work of a block is estimated as its number of weights, times the width of the gaps. From the chosen block on, no
    block has a stride or adds the input of an earlier block.
    """
    reaches, stages = network.config.reaches, [stage for _, stage in network.config.blocks()]
    sizes = [sum(weights.numel() for weights in block.parameters()) for block in network.blocks]
    widest = max(reaches)
    best, least = Spacing(widest, widest, None), (1 - WORTH_MOVING) * widest * sum(sizes)
    for i in reversed(range(1, len(reaches))):
        block = network.blocks[i]
        assert isinstance(block, Block)
        if len(block.earlier) or stages[i].stride > 1:
            break
        near = max(network.config.body_stride, *reaches[:i])  # at least one frame after the strides
        work = near * sum(sizes[:i]) + widest * sum(sizes[i:])
        if work < least:
            best, least = Spacing(near, widest, i), work
    return best


@contextmanager
def moved_apart(
    network: StackNetwork,
    spacing: Spacing,
    starts: Tensor,
    starts_apart: Tensor,
    lengths: Tensor,
    time: int | Tensor,
    mask: type[Mask],
) -> Iterator[None]:
    """Make `network`, within this context, move clips apart before the block that `spacing` names, if it names one.

    Args:
        network: The network that scores the clips.
        spacing: The gaps, as :func:`find_spacing` chose them for this network.
        starts: [rows] int64, the feature frame at which each clip starts before the move.
        starts_apart: [rows] int64, the feature frame at which each clip starts after the move.
        lengths: [rows] int64, the feature frames of each clip.
        time: The feature frames of the whole time axis after the move.
        mask: The class of masks that keep clips apart.
    """
    if spacing.block is None:
        yield
        return
    stride = network.config.body_stride
    slots = strided(lengths + spacing.near, stride)
    position = torch.arange((time + stride - 1) // stride)  # type: ignore[arg-type]
    row = (position[:, None] >= starts_apart // stride).long().sum(1) - 1
    since_start = position - (starts_apart // stride)[row]
    # All positions of a wider gap read the last frame of the clip's slot, which is in the gap before the move too.
    index = (starts // stride)[row] + torch.minimum(since_start, slots[row] - 1)
    moved = mask((since_start < strided(lengths, stride)[row])[None, None, None])

    def move(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # With channels last, the runtime copies whole frames; it changes layouts here in any case.
        x = inputs[0].permute(0, 2, 3, 1).index_select(2, index).permute(0, 3, 1, 2)
        return moved.apply(x), moved, *inputs[2:]

    handle = network.blocks[spacing.block].register_forward_pre_hook(move)
    try:
        yield
    finally:
        handle.remove()
