"""A network that computes in float16 or bfloat16, but for what their precision would spoil."""

import copy

import torch
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import ClipNorm, PositionalConv
from torch import Tensor, nn

from carnelian_export.graph.folding import fold_batch_norms

SENSITIVE = (nn.LayerNorm, ClipNorm, PositionalConv)
"""What sums squares over many numbers. Batch norms are folded in float32 first; log-softmax is in float32 always."""


def lower(network: CtcNetwork, dtype: torch.dtype) -> CtcNetwork:
    """A copy whose parameters and activations are of `dtype`, but for :data:`SENSITIVE` modules."""
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
