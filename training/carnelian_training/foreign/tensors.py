"""Tensors of other toolkits' checkpoints: their names without wrappers."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from carnelian_training.tensor_checks import is_dense
from carnelian_training.weight_files import CheckpointError

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""The parts that `DataParallel`, `torch.compile` and other wrappers add to the names of tensors."""


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts in :data:`WRAPPERS`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


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
