"""Reading pickled checkpoints that contain objects of other packages, without running any of their code.

Tensors, dictionaries and plain values are read. An object of any other class becomes an :class:`Inert` object, which
keeps its data from the file; the class is never looked up, so none of its code can run.
"""

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from carnelian_training.weight_files import (
    CheckpointError,
    check_holds_weights,
    check_undamaged,
    load_torch,
    torch_reason,
)

# The part of what PyTorch's own reader of weights allows that checkpoints of tensors need.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("builtins", "set"): set,
}


class NotForeignError(CheckpointError):
    """The file cannot be read at all, or is a checkpoint of Carnelian already."""


class Inert:
    """An object of an unknown class, with its arguments and its state as data; its entries, if any, are not needed."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> "Inert":
        """Stand for the result of a call, of which only the arguments are known."""
        return Inert(*arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *entry: Any) -> None:
        """Drop an entry, as of a list or a dictionary."""

    extend = __setitem__ = append


class Unpickler(pickle.Unpickler):
    """An unpickler that looks up only the classes and functions that tensors need."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is allowed, otherwise a new subclass of :class:`Inert`."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        return type(name.replace(".", "_"), (Inert,), {"__new__": _new})


def _new(cls: type[Inert], *arguments: Any) -> Inert:
    made = object.__new__(cls)
    Inert.__init__(made, *arguments)
    return made


def load(file: io.BufferedIOBase, **options: Any) -> Any:
    """Load like `pickle.load`; `torch.load` calls this for files from before PyTorch 1.6."""
    return Unpickler(file, **options).load()


def load_checkpoint(path: Path) -> Any:
    """Read the content of a `.pt` file, with :class:`Inert` objects, which :func:`plain` converts to data.

    Raises:
        NotForeignError: The file cannot be read.
        CheckpointError: The file is damaged, or is no file of weights.
    """
    check_holds_weights(path)
    check_undamaged(path)
    try:
        with path.open("rb") as file:
            return load_torch(file, weights_only=False, pickle_module=sys.modules[__name__])
    except Exception as error:
        raise NotForeignError(f"{path} cannot be read as a checkpoint: {torch_reason(error)}") from error


MOST_VALUES = 1_000_000
"""The largest number of values that `plain` returns; a small file may refer to one object billions of times."""


def plain(value: Any, where: str) -> Any:
    """Convert `argparse.Namespace`, omegaconf's nodes and enumerations to dictionaries, lists and values.

    Raises:
        CheckpointError: There are more than `MOST_VALUES` values, or they nest too deep.
    """
    numbers = iter(range(MOST_VALUES))

    def convert(value: Any) -> Any:
        if next(numbers, None) is None:
            raise CheckpointError(f"{where} must hold at most {MOST_VALUES:,} options, but holds more")
        if isinstance(value, dict):
            return {key: convert(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(entry) for entry in value]
        if not isinstance(value, Inert):
            return value
        state = value.state
        if isinstance(state, tuple) and len(state) == 2:  # the state of a class with slots
            state = state[0] or state[1]
        if isinstance(state, dict):
            for content in ("_content", "_val"):  # in omegaconf's containers and leaves
                if content in state:
                    return convert(state[content])
            return {key: convert(entry) for key, entry in state.items()}
        return convert(value.arguments[0]) if value.arguments else None

    try:
        return convert(value)
    except RecursionError as error:
        raise CheckpointError(f"{where} must hold options, but they nest too deep") from error
