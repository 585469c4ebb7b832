"""Tensors of other toolkits' checkpoints: their names without wrappers, and checks that they fit a network."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carnelian_training.weight_files import CheckpointError

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The parts that `DataParallel`, `torch.compile` and other wrappers add to the names of tensors."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
"""The supported types of tensors. Smaller ones belong to quantised networks, whose scales are stored elsewhere."""


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts in :data:`WRAPPERS`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_dense(tensor: Any) -> bool:
    """Return whether this is a tensor with each of its numbers in memory, not sparse, nested or quantised."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()  # not one number repeated
    )


def plain_tensors(found: Any, path: Path) -> dict[str, Tensor]:
    """Return weights by their names without wrappers, and check that all are dense tensors.

    Raises:
        CheckpointError: Some are not dense tensors (but arrays of other packages, sparse or quantised), or two have the
            same name without wrappers; the message names each.
    """
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} must hold its weights by name, but holds {type(found).__name__}")
    wrong = [str(name) for name, tensor in found.items() if not (isinstance(name, str) and is_dense(tensor))]
    if wrong:
        raise CheckpointError(
            f"{path}: each of its weights must be a dense tensor, but these are not: {', '.join(wrong)}"
        )
    twice = [name for name, count in Counter(map(plain_name, found)).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{path}: each of its weights must be there once, but these are there with a wrapper's name and without: "
            f"{', '.join(twice)}"
        )
    return {plain_name(name): tensor for name, tensor in found.items()}


def num_rows(matrix: Tensor | None) -> int:
    """Return the number of rows of a head's weights; 0 if there are no weights or they are a single number."""
    return 0 if matrix is None or matrix.ndim == 0 else len(matrix)


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
