"""Checks that the tensors of a checkpoint, our own or another toolkit's, can be the weights of a network."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carnelian_training.weight_files import CheckpointError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
"""The supported types of tensors. Smaller ones belong to quantised networks, whose scales are stored elsewhere."""


def is_dense(tensor: Any) -> bool:
    """Return whether this is a tensor with each of its numbers in memory, not sparse, nested or quantised."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()  # not one number repeated
    )


def find_mistake(name: str, tensor: Tensor, shape: list[int]) -> str | None:
    """Return a line for :func:`check_fit`; None if the shape is this, the type in `DTYPES`, and the values possible."""
    if list(tensor.shape) != shape:
        return f"  {name}: must be {shape}, but is {list(tensor.shape)}"
    if tensor.dtype not in DTYPES:
        return f"  {name}: must hold numbers of 16 bits or more, but holds {tensor.dtype}".replace("torch.", "")
    if not tensor.float().isfinite().all():
        return f"  {name}: holds numbers that are not finite in float32"
    if name.endswith("running_var") and (tensor < 0).any():
        return f"  {name}: holds variances, but some are negative"
    return None


def check_fit(mistakes: list[str], path: Path) -> None:
    """Raise an error if there are mistakes.

    Raises:
        CheckpointError: There are mistakes; the message has a line for each.
    """
    if mistakes:
        raise CheckpointError(
            "\n".join([f"{path}: {len(mistakes)} tensor(s) do not fit the network that it describes:", *mistakes])
        )
