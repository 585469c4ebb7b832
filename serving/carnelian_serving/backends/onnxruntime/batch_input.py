"""Triton's `batch_input`: tensors that describe the batch, so that a ragged model can take it apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carnelian_serving.backends.model_config import DTYPES, Array, ConfigError, ModelConfig

Shapes = Sequence[tuple[int, ...]]
"""The source input's shape in each request, batch dimension first."""


def _element_counts(shapes: Shapes) -> Array:
    return np.array([int(np.prod(shape)) for shape in shapes], np.int64)


def _item_shapes(shapes: Shapes) -> Array:
    # Every row of a request has its shape: [[2, 64, 9], [1, 64, 5]] -> [[64, 9], [64, 9], [64, 5]]
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


_KINDS: Mapping[str, Callable[[Shapes], Array]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_element_counts(shapes)]),
    # The shape of this tensor carries the value.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(_element_counts(shapes).max(), np.int64),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).reshape(-1),
}


@dataclass(frozen=True)
class BatchInput:
    """Makes one tensor from the shapes of an input's requests."""

    target: str
    """The model's input that receives it."""
    source: str
    """The input whose shapes it describes."""
    dtype: np.dtype[Any]
    """The type of the tensor: int32 or float32."""
    build: Callable[[Shapes], Array]
    """Computes the tensor from those shapes."""

    def __call__(self, shapes: Shapes) -> Array:
        """Return the tensor for requests of these shapes."""
        return self.build(shapes).astype(self.dtype)


def read_batch_inputs(config: ModelConfig) -> list[BatchInput]:
    """Read the `batch_input` fields.

    Raises:
        ConfigError: A kind is not supported, or a source is not an input.
    """
    inputs = []
    for message in config.batch_inputs:
        kind, data_type = message["kind"], message["data_type"]
        if kind not in _KINDS:
            raise ConfigError(
                f"`batch_input` kind in {config.name!r} must be one of {', '.join(_KINDS)}, but is {kind}"
            )
        if data_type not in ("TYPE_INT32", "TYPE_FP32"):
            raise ConfigError(
                f"`batch_input` data_type in {config.name!r} must be TYPE_INT32 or TYPE_FP32, but is {data_type}"
            )
        (source,) = message["source_input"]
        if source not in (tensor.name for tensor in config.inputs):
            raise ConfigError(f"`batch_input` of {config.name!r} must name an input, but names {source!r}")
        dtype = np.dtype(DTYPES[data_type])
        inputs += [BatchInput(target, source, dtype, _KINDS[kind]) for target in message["target_name"]]
    return inputs
