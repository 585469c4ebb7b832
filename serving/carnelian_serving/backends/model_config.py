"""Reads a model's configuration, and refuses what a backend cannot do.

A native backend ignores a parameter that it does not know, and some fields that it does not support; a typo
then costs a day. These backends name it instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

DTYPES: Mapping[str, DTypeLike] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}


class ConfigError(ValueError):
    """The configuration asks for something that the backend cannot do, or contradicts the model file."""


@dataclass(frozen=True)
class TensorConfig:
    """An `input` or `output` of the configuration."""

    name: str
    dtype: np.dtype[Any]
    """The type of its elements."""
    dims: tuple[int, ...]
    """Its shape without the batch dimension; -1 for any length."""
    is_ragged: bool
    """Whether `allow_ragged_batch` is set."""

    def accepts(self, shape: Sequence[int]) -> bool:
        """Return whether a row of this shape (no batch dimension) agrees with `dims`."""
        return len(shape) == len(self.dims) and all(
            want in (-1, got) for want, got in zip(self.dims, shape, strict=True)
        )


@dataclass(frozen=True)
class ModelConfig:
    """The part of a model's configuration that the Python-based backends obey."""

    name: str
    max_batch_size: int
    """Rows in a batch, at least 1."""
    inputs: tuple[TensorConfig, ...]
    """The inputs, in the configuration's order."""
    outputs: tuple[TensorConfig, ...]
    """The outputs, in the configuration's order; DALI's are matched to them by position."""
    batch_inputs: tuple[Mapping[str, Any], ...]
    """The `batch_input` messages, as Triton's JSON has them."""
    parameters: Mapping[str, str]
    """The values of `parameters { key value { string_value } }`, by key."""
    graph_level: int | None
    """`optimization { graph { level } }`, or None."""
    model_filename: str
    """`default_model_filename`, or the backend's own."""
    folder: Path
    """The folder of the version that is served."""
    gpu_accelerators: Mapping[str, Mapping[str, str]]
    """`optimization { execution_accelerators { gpu_execution_accelerator } }`: name -> parameters."""

    def integer(self, key: str) -> int:
        """Return a parameter as an integer; 0 if it is not set.

        Raises:
            ConfigError: Its value is not one.
        """
        value = self.parameters.get(key, "0")
        try:
            return int(value)
        except ValueError:
            raise ConfigError(f"parameter {key!r} of {self.name!r} must be an integer, but is {value!r}") from None

    def boolean(self, key: str) -> bool:
        """Return a parameter as a boolean, in the spellings that Triton accepts; true if it is not set.

        Raises:
            ConfigError: Its value is not one.
        """
        value = self.parameters.get(key, "true")
        if value.lower() in ("true", "on", "1"):
            return True
        if value.lower() in ("false", "off", "0"):
            return False
        raise ConfigError(f"parameter {key!r} of {self.name!r} must be true or false, but is {value!r}")


def read_model_config(
    text: str, folder: Path, *, known_parameters: Collection[str], default_filename: str
) -> ModelConfig:
    """Read the configuration from the JSON that Triton gives a Python backend.

    Args:
        text: `args["model_config"]`.
        folder: The version's folder.
        known_parameters: Keys that the backend reads; any other is refused.
        default_filename: The model file's name where the configuration has none.

    Raises:
        ConfigError: It asks for what these backends do not do.
    """
    config = json.loads(text)
    name = config["name"]
    if config["max_batch_size"] < 1:
        raise ConfigError(f"`max_batch_size` of {name!r} must be at least 1, but is {config['max_batch_size']}")
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    if unknown := sorted(set(parameters) - set(known_parameters)):
        raise ConfigError(
            f"parameters of {name!r} must be among {', '.join(sorted(known_parameters))}, but there is "
            f"{', '.join(unknown)}"
        )
    if not config["input"] or not config["output"]:
        raise ConfigError(f"{name!r} must name its inputs and outputs in the configuration, but does not")
    for unsupported in ("batch_output", "sequence_batching"):
        if config.get(unsupported):
            raise ConfigError(f"`{unsupported}` of {name!r} is not supported here; take it out of the configuration")
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    if accelerators.get("cpu_execution_accelerator"):  # OpenVINO: ONNX Runtime of PyPI is built without it
        raise ConfigError(
            f"`cpu_execution_accelerator` of {name!r} is not supported here; take it out of the configuration"
        )
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError(f"{name!r} must not be decoupled: this backend sends one response for each request")
    return ModelConfig(
        name=name,
        max_batch_size=config["max_batch_size"],
        inputs=tuple(_read_tensor(tensor, name) for tensor in config["input"]),
        outputs=tuple(_read_tensor(tensor, name) for tensor in config["output"]),
        batch_inputs=tuple(config["batch_input"]),
        parameters=parameters,
        graph_level=config.get("optimization", {}).get("graph", {}).get("level"),
        model_filename=config.get("default_model_filename") or default_filename,
        folder=folder,
        gpu_accelerators={
            accelerator["name"]: accelerator.get("parameters", {})
            for accelerator in accelerators.get("gpu_execution_accelerator", [])
        },
    )


def _read_tensor(tensor: Mapping[str, Any], model: str) -> TensorConfig:
    name, data_type = tensor["name"], tensor["data_type"]
    if data_type not in DTYPES:
        raise ConfigError(f"{name!r} of {model!r} must have one of {', '.join(DTYPES)}, but has {data_type}")
    for unsupported in ("reshape", "optional", "is_shape_tensor"):
        if tensor.get(unsupported):
            raise ConfigError(f"`{unsupported}` of {name!r} in {model!r} is not supported here; take it out")
    dims = tuple(int(size) for size in tensor["dims"])
    return TensorConfig(name, np.dtype(DTYPES[data_type]), dims, bool(tensor.get("allow_ragged_batch")))
