"""The names of the tensors of Jasper and QuartzNet in NeMo and DLE.

These toolkits build a network of the same modules in the same order, under other names. There a block is a flat list of
layers, with activations and dropout, so a name contains a position: `encoder.encoder.3.mconv.5.conv.weight`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training.checkpoint import build_model
from carnelian_training.config import Config
from carnelian_training.models.blocks import Block
from carnelian_training.models.network import StackNetwork
from carnelian_training.tensor_checks import check_fit, find_mistake
from carnelian_training.weight_files import CheckpointError


@dataclass(frozen=True)
class Naming:
    """A toolkit's names of the tensors of one architecture."""

    blocks: str
    body: str
    """The name of a block's list of layers."""
    conv: str
    """The name of a convolution's weight, after its position in a list."""
    head: str
    label_options: str = "--set 'labels=[...]'"
    """The options of an import that name the labels."""


NEMO = Naming("encoder.encoder", "mconv", "conv.weight", "decoder.decoder_layers.0")
NEMO_UNMASKED = Naming("encoder.encoder", "mconv", "weight", "decoder.decoder_layers.0")  # `conv_mask: false`
DLE_LABEL_OPTIONS = f"--dle-config FILE.yaml, or {NEMO.label_options}"
DLE_QUARTZNET = Naming("encoder.layers", "mconv", "weight", "decoder.layers.0", DLE_LABEL_OPTIONS)
DLE_JASPER = Naming("encoder.layers", "conv", "weight", "decoder.layers.0", DLE_LABEL_OPTIONS)

DLE_V1_PREFIXES = {"jasper_encoder.encoder.": "encoder.layers.", "jasper_decoder.decoder_layers.": "decoder.layers."}
"""The prefixes of names in DLE's Jasper of 2019 and 2020, and today's."""

_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def names(config: Config, naming: Naming) -> dict[str, str]:
    """Return the toolkit's name of every tensor of a network, by its name in Carnelian."""
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
    # Dense residual: in the toolkits, the oldest input comes first and the block's own input last.
    for k in range(len(block.earlier)):
        yield f"earlier.{k}.conv.weight", f"res.{k}.0.{naming.conv}"
        yield from _norm_names(f"earlier.{k}.norm", f"res.{k}.1")
    if block.projection is not None:
        yield "projection.weight", f"res.{len(block.earlier)}.0.{naming.conv}"
        yield from _norm_names("projection_norm", f"res.{len(block.earlier)}.1")


def _norm_names(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    return ((f"{ours}.{part}", f"{theirs}.{part}") for part in _NORM)


def take(found: Mapping[str, Tensor], config: Config, naming: Naming, path: Path) -> dict[str, Tensor]:
    """Convert another toolkit's tensors to the float32 weights of a network of `config`.

    Raises:
        CheckpointError: Tensors are missing, unexpected, of another shape, or not finite; the message gives each by the
            toolkit's name.
    """
    table = names(config, naming)
    # Checkpoints from before PyTorch 0.4.1, and of some converters, have no `num_batches_tracked`, which is not used.
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
        # A copy, because all loaded tensors may share one storage.
        weights[ours] = found[theirs].reshape(wanted[ours].shape).to(wanted[ours].dtype, copy=True)
    try:
        check_fit(mistakes, path)
    except CheckpointError as error:
        head = found.get(f"{naming.head}.bias")
        if head is None or head.numel() == len(config.labels) + 1:
            raise
        raise CheckpointError(
            f"{error}\nits head has {head.numel() - 1} labels, but {len(config.labels)} were taken; name them in its "
            f"order: carnelian-train import {naming.label_options}"
        ) from error
    return weights


def give(weights: Mapping[str, Tensor], config: Config, naming: Naming) -> dict[str, Tensor]:
    """Convert the weights of a network of `config` to another toolkit's tensors, in float32."""
    result = {}
    for ours, theirs in names(config, naming).items():
        tensor = weights[ours]
        tensor = tensor.squeeze(2) if tensor.ndim == 4 else tensor
        result[theirs] = tensor.float().contiguous() if tensor.is_floating_point() else tensor.clone()
    return result
