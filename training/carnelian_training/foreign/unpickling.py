"""Reading pickled checkpoints that hold objects of packages that are not here, without running any of their code.

Tensors, dictionaries and plain values are read. An object of any other class becomes an :class:`Inert` one, which keeps
what the file says of it; the class is never looked up, so nothing of it can run.
"""

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from carnelian_training.weight_files import CheckpointError, check_holds_weights, check_undamaged, torch_reason

# What PyTorch's own reader of weights allows, as far as checkpoints of tensors need it.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("builtins", "set"): set,
}


class Inert:
    """An object of a class that is not here: its arguments and its state, as data."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []

    def __call__(self, *arguments: Any) -> "Inert":
        """What a function of that package would have made, unknown but for its arguments."""
        return Inert(*arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Keep an entry, where the object is a list."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Keep entries."""
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class Unpickler(pickle.Unpickler):
    """Looks up nothing but what tensors are made of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, or a new :class:`Inert` one in its place."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        return type(name.replace(".", "_"), (Inert,), {"__new__": _new})


def _new(cls: type[Inert], *arguments: Any) -> Inert:
    made = object.__new__(cls)
    Inert.__init__(made, *arguments)
    return made


def load(file: io.BufferedIOBase, **options: Any) -> Any:
    """As `pickle.load`: `torch.load` asks for it in files of before PyTorch 1.6."""
    return Unpickler(file, **options).load()


def load_checkpoint(path: Path) -> Any:
    """What a `.pt` file holds, objects of other classes as :class:`Inert`; :func:`plain` makes data of them.

    Raises:
        CheckpointError: It is damaged or cannot be read.
    """
    check_holds_weights(path)
    check_undamaged(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=sys.modules[__name__])
    except Exception as error:  # torch names no common base for what a damaged file raises
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {torch_reason(error)}") from error


def plain(value: Any) -> Any:
    """Dictionaries, lists and values out of `argparse.Namespace`, omegaconf's nodes and enumerations."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if not isinstance(value, Inert):
        return value
    state = value.state[0] or value.state[1] if isinstance(value.state, tuple) else value.state
    if isinstance(state, dict):
        for content in ("_content", "_val"):  # of omegaconf's containers and of its leaves
            if content in state:
                return plain(state[content])
        return {key: plain(entry) for key, entry in state.items()}
    return plain(value.arguments[0]) if value.arguments else None
