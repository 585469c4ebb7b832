"""Lay the clips of a batch along one time axis, with gaps as wide as convolutions look to either side, and back.

Most convolutions of QuartzNet look up to 37 frames to either side, and one of its last looks 86. If all gaps were as
wide as that one needs, eight clips of two seconds would take 1,410 frames, 602 of them in gaps. So clips lie close
together at first, and are moved apart right before the block that looks further.
"""

from collections.abc import Iterator, Sequence
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
        if not isinstance(block, Block):
            raise TypeError(f"block {i} must be a Block of models/blocks.py, but is of class {type(block).__name__}")
        if len(block.earlier) or stages[i].stride > 1:
            break
        near = max(network.config.body_stride, *reaches[:i])  # at least one frame after the strides
        work = near * sum(sizes[:i]) + widest * sum(sizes[i:])
        if work < least:
            best, least = Spacing(near, widest, i), work
    return best


def count(lengths: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lengths that the senders claim, [rows, 1] int64, and how much of that each row has, [rows] int64.

    Args:
        lengths: [rows, 1] int32, the lengths that the senders claim; negative ones count as zero.
        sizes: [rows] int64, the length of each row's tensor.
    """
    counted = lengths.long().clamp(min=0)  # the largest int32 would overflow when it is rounded up to a stride
    return counted, torch.minimum(counted[:, 0], sizes)


def line_up(lengths: Tensor, gap: int, stride: int) -> Tensor:
    """Return where each clip starts on one time axis: at multiples of `stride`, at least `gap` behind the clip before.

    `lengths` and the result are [rows] int64, in frames.
    """
    slots = strided(lengths + gap, stride) * stride
    return slots.cumsum(0) - slots


def extend(time: Tensor, steps: Sequence[int]) -> Tensor:
    """Return the first of `steps` (ascending) that is at least `time`, or else the next multiple of the last one."""
    extended = (time + steps[-1] - 1) // steps[-1] * steps[-1]
    for step in reversed(steps[:-1]):
        extended = torch.where(time <= step, step, extended)
    return extended


def owners(starts: Tensor, time: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return which row owns each position of a time axis, its gap included, and how far behind the row's start it is.

    Args:
        starts: [rows] int64, the position at which each row starts; the first one is 0.
        time: The number of positions.

    Returns:
        The index of the row and the distance from its start, [time] int64 each.
    """
    position = torch.arange(time)  # type: ignore[arg-type]
    row = (position[:, None] >= starts).sum(1) - 1
    return row, position - starts[row]


def pack(
    features: Tensor, first: Tensor, frames: Tensor, real: Tensor, starts: Tensor, time: int | Tensor, num_mels: int
) -> tuple[Tensor, Tensor]:
    """Lay ragged rows out along one time axis.

    Args:
        features: [total] float32; the rows' [num_mels, frames] tensors, flat, in order.
        first: [rows] int64, where each row's tensor starts in `features`.
        frames: [rows] int64, the frames in each row's tensor.
        real: [rows] int64, how many frames of each row to lay out, at most `frames`.
        starts: [rows] int64, the position at which each row starts.
        time: The number of positions, at least 1.
        num_mels: The mel bands of a frame.

    Returns:
        The features, [num_mels, time] float32, zero in the gaps; and a mask, [time] bool, False in the gaps.
    """
    row, since_start = owners(starts, time)
    valid = since_start < real[row]
    lowest = first[row] + since_start  # the index in `features` of the lowest mel band
    index = lowest + torch.arange(num_mels)[:, None] * frames[row]  # [num_mels, time]
    # Gaps read a zero of their own, so that NaN stays in its row and a batch of empty rows has something to read.
    padded = torch.cat([features, features.new_zeros(1)])
    return padded[torch.where(valid, index, features.shape[0])], valid


def unpack(packed: Tensor, longest: int | Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
    """Turn one time axis into a padded batch: [time, channels] -> [rows, longest, channels], zero after a row's end."""
    time = torch.arange(longest)  # type: ignore[arg-type]
    inside = time < lengths[:, None]  # [rows, longest]
    index = torch.where(inside, starts[:, None] + time, 0)
    return torch.where(inside[:, :, None], packed[index], torch.zeros(()))


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
    row, since_start = owners(starts_apart // stride, (time + stride - 1) // stride)
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
