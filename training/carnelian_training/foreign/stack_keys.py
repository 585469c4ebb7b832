"""What the tensors of Jasper and QuartzNet are called elsewhere: the one place that knows.

All of these toolkits build a network of the same modules in the same order, under other names. A block there is a flat
list of layers, activations and dropout included, so a name holds a position: `encoder.encoder.3.mconv.5.conv.weight`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training.checkpoint import build_model
from carnelian_training.config import Config
from carnelian_training.foreign.tensors import check_fit, find_mistake
from carnelian_training.models.blocks import Block
from carnelian_training.models.network import StackNetwork


@dataclass(frozen=True)
class Naming:
    """Where a toolkit keeps the tensors of one architecture."""

    blocks: str
    body: str
    """A block's list of layers."""
    conv: str
    """A convolution's weight, below its position in a list."""
    head: str


NEMO = Naming("encoder.encoder", "mconv", "conv.weight", "decoder.decoder_layers.0")
NEMO_UNMASKED = Naming("encoder.encoder", "mconv", "weight", "decoder.decoder_layers.0")  # `conv_mask: false`
DLE_QUARTZNET = Naming("encoder.layers", "mconv", "weight", "decoder.layers.0")
DLE_JASPER = Naming("encoder.layers", "conv", "weight", "decoder.layers.0")

DLE_V1_PREFIXES = {"jasper_encoder.encoder.": "encoder.layers.", "jasper_decoder.decoder_layers.": "decoder.layers."}
"""DLE's Jasper of 2019 and 2020."""

_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def names(config: Config, naming: Naming) -> dict[str, str]:
    """Every tensor of a network: its name here -> its name there."""
    with torch.device("meta"):
        network = build_model(config)
    assert isinstance(network, StackNetwork)
    table = {f"head.{part}": f"{naming.head}.{part}" for part in ("weight", "bias")}
    for i, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        for ours, theirs in _block_names(block, naming):
            table[f"blocks.{i}.{ours}"] = f"{naming.blocks}.{i}.{theirs}"
    return table


def _block_names(block: Block, naming: Naming) -> Iterator[tuple[str, str]]:
    position = 0
    for r, sub_block in enumerate(block.sub_blocks):
        ours = f"sub_blocks.{r}"
        for conv in ("depthwise", "pointwise"):
            if getattr(sub_block, conv) is not None:
                yield f"{ours}.{conv}.weight", f"{naming.body}.{position}.{naming.conv}"
                position += 1
        yield from _norm_names(f"{ours}.norm", f"{naming.body}.{position}")
        position += 3  # batch norm, activation, dropout
    # Dense residual: there, the oldest input comes first and the block's own comes last.
    for k in range(len(block.earlier)):
        yield f"earlier.{k}.conv.weight", f"res.{k}.0.{naming.conv}"
        yield from _norm_names(f"earlier.{k}.norm", f"res.{k}.1")
    if block.projection is not None:
        yield "projection.weight", f"res.{len(block.earlier)}.0.{naming.conv}"
        yield from _norm_names("projection_norm", f"res.{len(block.earlier)}.1")


def _norm_names(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    return ((f"{ours}.{part}", f"{theirs}.{part}") for part in _NORM)


def take(found: Mapping[str, Tensor], config: Config, naming: Naming, path: Path) -> dict[str, Tensor]:
    """The weights of a network of `config`, float32, out of another toolkit's.

    Raises:
        CheckpointError: Tensors are missing, unexpected or misshapen; each is named as it is called there.
    """
    table = names(config, naming)
    # Checkpoints of before PyTorch 0.4.1, and of some converters, do not count; nothing here needs the count.
    counts = {theirs for theirs in table.values() if theirs.endswith(".num_batches_tracked")}
    found = {**dict.fromkeys(counts, torch.zeros((), dtype=torch.int64)), **found}
    with torch.device("meta"):
        wanted = build_model(config).state_dict()
    mistakes = [f"  {theirs}: missing" for theirs in sorted(set(table.values()) - found.keys())]
    mistakes += [f"  {name}: unexpected" for name in sorted(found.keys() - set(table.values()))]
    weights = {}
    for ours, theirs in table.items():
        if theirs not in found:
            continue
        # [out, in, kernel] -> [out, in, 1, kernel]: convolutions are 2-D here
        shape = [size for axis, size in enumerate(wanted[ours].shape) if axis != 2]
        if mistake := find_mistake(theirs, found[theirs], shape):
            mistakes.append(mistake)
            continue
        # A copy: what was loaded may be one storage of everything.
        weights[ours] = found[theirs].reshape(wanted[ours].shape).to(wanted[ours].dtype, copy=True)
    check_fit(mistakes, path)
    return weights


def give(weights: Mapping[str, Tensor], config: Config, naming: Naming) -> dict[str, Tensor]:
    """The weights of a network of `config` as another toolkit has them, float32."""
    result = {}
    for ours, theirs in names(config, naming).items():
        tensor = weights[ours]
        tensor = tensor.squeeze(2) if tensor.ndim == 4 else tensor
        result[theirs] = tensor.float().contiguous() if tensor.is_floating_point() else tensor.clone()
    return result
