"""Convert a network to float16 or bfloat16, except for modules that need the precision of float32."""

import copy

import torch
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import ClipNorm, PositionalConv
from torch import Tensor, nn

from carnelian_export.graph.folding import fold_batch_norms

SENSITIVE = (nn.LayerNorm, ClipNorm, PositionalConv)
"""The modules that stay in float32, because they sum squares over many numbers. Batch norms are folded in float32
before the conversion; log-softmax is always in float32."""


def lower(network: CtcNetwork, dtype: torch.dtype) -> CtcNetwork:
    """Return a copy of a network whose parameters and activations have `dtype`, except in :data:`SENSITIVE` modules."""
    network = fold_batch_norms(network) if isinstance(network, StackNetwork) else copy.deepcopy(network)
    network.to(dtype)
    for module in network.modules():
        if isinstance(module, SENSITIVE):
            module.float()
            module.register_forward_pre_hook(_raise_input)
            module.register_forward_hook(lambda module, inputs, output: output.to(dtype))
    return network


def _raise_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].float(), *inputs[1:])
