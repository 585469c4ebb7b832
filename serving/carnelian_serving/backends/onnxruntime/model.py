"""The `onnxruntime` backend: `model.onnx` through the Python package `onnxruntime`.

Reads the fields of the configuration that the native backend reads, and builds the same tensors from them: an
input with `allow_ragged_batch` arrives in the graph as one flat tensor of all rows of all requests, and
`batch_input` tells their shapes; every other input is concatenated along the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

from carnelian_serving.backends.batching import Batches, Rows, check_output
from carnelian_serving.backends.model_config import DTYPES, ConfigError, ModelConfig, TensorConfig, read_model_config
from carnelian_serving.backends.onnxruntime.batch_input import read_batch_inputs
from carnelian_serving.backends.onnxruntime.providers import (
    CUDA_PARAMETERS,
    STEPS_KEY,
    Provider,
    gpu_providers,
    open_session,
    prepares_each_shape,
)
from carnelian_serving.backends.onnxruntime.session_options import SESSION_PARAMETERS, read_session_options
from carnelian_serving.backends.parts import MAX_RUN_ELEMENTS, split

PARAMETERS = (*SESSION_PARAMETERS, *CUDA_PARAMETERS)
DEFAULT_FILENAME = "model.onnx"
_ONNX_NAMES = {"TYPE_FP32": "float", "TYPE_FP64": "double"}
ONNX_TYPES = {
    f"tensor({_ONNX_NAMES.get(data_type, np.dtype(dtype).name)})": data_type for data_type, dtype in DTYPES.items()
}
"""Triton's name for each element type, by ONNX Runtime's; that is numpy's, but for two."""
AGAIN = "export the graph again (under another name, where carnelian-export refuses to replace this one)"


class TritonPythonModel:
    """One instance of an ONNX model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Take the inputs and outputs from the graph if the configuration names none."""
        if not config.as_dict()["input"] or not config.as_dict()["output"]:
            complete_tensors(config, Path(pb_utils.get_model_dir()))
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the session.

        Raises:
            ConfigError: The configuration does not agree with the graph.
        """
        folder = Path(args["model_repository"], args["model_version"])
        self._config = read_model_config(
            args["model_config"], folder, known_parameters=PARAMETERS, default_filename=DEFAULT_FILENAME
        )
        self._batch_inputs = read_batch_inputs(self._config)
        self._session = load_session(self._config, args["model_instance_kind"], args["model_instance_device_id"])
        give_back_freed_memory()
        check_graph(self._config, self._session, [tensor.target for tensor in self._batch_inputs])
        self._ragged = {tensor.name for tensor in self._config.inputs if tensor.is_ragged}
        provider = self._session.get_providers()[0]
        self._splits = bool(self._ragged) and provider == "CPUExecutionProvider"
        has_few_shapes = STEPS_KEY in self._session.get_modelmeta().custom_metadata_map
        prepares = provider == "CUDAExecutionProvider" and prepares_each_shape(onnxruntime.__version__)
        if self._ragged and prepares and not has_few_shapes:
            pb_utils.Logger.log_warn(
                f"{self._config.name!r} runs on the CUDA provider of ONNX Runtime {onnxruntime.__version__}, which "
                "prepares convolutions anew whenever a batch has another shape, which can take many times as long as "
                "to run them: export Jasper and QuartzNet with --execution-provider cuda; for others, try tensorrt"
            )
        self._outputs = [tensor.name for tensor in self._config.outputs]
        self._batches = Batches(self._config, self._run, split=self._split if self._splits else None)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests as one batch."""
        return self._batches.execute(requests)

    def finalize(self) -> None:
        """Free the session."""
        del self._session

    def _split(self, inputs: Rows) -> Iterator[slice]:
        sizes = [sum(array.size for array in arrays) for arrays in zip(*(inputs[n] for n in self._ragged), strict=True)]
        return split(sizes, MAX_RUN_ELEMENTS)

    def _run(self, inputs: Rows) -> Rows:
        """Run requests as one batch; a single large request runs in parts of its rows."""
        requests = next(iter(inputs.values()))
        if not self._splits or len(requests) > 1:
            return self._run_whole(inputs)
        row_size = sum(inputs[name][0][0].size for name in self._ragged)
        parts = list(split([row_size] * len(requests[0]), MAX_RUN_ELEMENTS))
        if len(parts) == 1:
            return self._run_whole(inputs)
        answers = [self._run_whole({name: [arrays[0][part]] for name, arrays in inputs.items()}) for part in parts]
        outputs = {name: [answer[name][0] for answer in answers] for name in self._outputs}
        if any(len({array.shape[1:] for array in arrays}) > 1 for arrays in outputs.values()):
            return self._run_whole(inputs)  # a graph that pads to the longest of the batch
        return {name: [np.concatenate(arrays)] for name, arrays in outputs.items()}

    def _run_whole(self, inputs: Rows) -> Rows:
        feeds = {name: self._join(name, arrays) for name, arrays in inputs.items()}
        for tensor in self._batch_inputs:
            feeds[tensor.target] = tensor([array.shape for array in inputs[tensor.source]])
        outputs = self._session.run(self._outputs, feeds)
        counts = [len(array) for array in next(iter(inputs.values()))]
        ends = np.cumsum(counts)
        rows = {}
        for position, (name, output) in enumerate(zip(self._outputs, outputs, strict=True)):
            if output.ndim == 0 or len(output) != ends[-1]:
                raise ValueError(
                    f"output {name!r} of {self._config.name!r} must have a row for each of the {ends[-1]} "
                    f"rows of the batch, but its shape is {list(output.shape)}"
                )
            check_output(self._config, position, output.shape[1:], output.dtype)
            rows[name] = [output[end - count : end] for count, end in zip(counts, ends, strict=True)]
        return rows

    def _join(self, name: str, arrays: Sequence[Any]) -> Any:
        if name in self._ragged:
            arrays = [array.reshape(-1) for array in arrays]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def complete_tensors(config: Any, folder: Path) -> None:
    """Add the graph's inputs and outputs to Triton's `ModelConfig`, without their batch dimension.

    Raises:
        ConfigError: One is of a type that this backend does not take.
    """
    path = find_model(folder, config.as_dict()["default_model_filename"] or DEFAULT_FILENAME)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for tensors, add in (
        (session.get_inputs(), config.add_input),
        (session.get_outputs(), config.add_output),
    ):
        for tensor in tensors:
            if tensor.type not in ONNX_TYPES:
                raise ConfigError(
                    f"{tensor.name!r} of {path} must be one of {', '.join(ONNX_TYPES)}, but is {tensor.type}"
                )
            dims = [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]
            add({"name": tensor.name, "data_type": ONNX_TYPES[tensor.type], "dims": dims})


def find_model(folder: Path, filename: str) -> Path:
    """Return the model's file; a model of several files lies in a folder of this name."""
    path = folder / filename
    return path / DEFAULT_FILENAME if path.is_dir() else path


def load_session(config: ModelConfig, instance_kind: str, device_id: str) -> onnxruntime.InferenceSession:
    """Build the session that the configuration asks for.

    Args:
        config: Its parameters are named as the native backend names them.
        instance_kind: `CPU` or `GPU`.
        device_id: Of the GPU.

    Raises:
        ConfigError: The model file is missing, a parameter has no meaning, or the GPU's provider is
            there but cannot be loaded. An ONNX Runtime that was built without one runs on the CPU.
    """
    path = find_model(config.folder, config.model_filename)
    if not path.is_file():
        raise ConfigError(f"{config.name!r} must have a model file, but {path} is not there")
    providers: list[Provider] = [("CPUExecutionProvider", {})]
    if instance_kind == "GPU":
        providers = [*gpu_providers(config, device_id, onnxruntime.get_available_providers()), *providers]
    return open_session(path, read_session_options(config), providers)


def give_back_freed_memory() -> None:
    """Give freed memory that glibc keeps back to the system: after loading, up to three times a network's weights."""
    ctypes.CDLL(None).malloc_trim(0)


def check_graph(config: ModelConfig, session: onnxruntime.InferenceSession, batch_inputs: Sequence[str]) -> None:
    """Raise ConfigError unless the graph's inputs and outputs are the configuration's."""
    wanted = {tensor.name for tensor in config.inputs} | set(batch_inputs)
    found = {tensor.name for tensor in session.get_inputs()}
    if wanted != found:
        raise ConfigError(
            f"inputs and batch inputs of {config.name!r} must be those of the graph, {sorted(found)}, "
            f"but are {sorted(wanted)}"
        )
    available = {tensor.name for tensor in session.get_outputs()}
    if missing := sorted({tensor.name for tensor in config.outputs} - available):
        raise ConfigError(f"outputs of {config.name!r} must be among {sorted(available)}, but there is {missing}")
    _check_tensors(config.name, "input", config.inputs, session.get_inputs())
    _check_tensors(config.name, "output", config.outputs, session.get_outputs())


def _check_tensors(model: str, kind: str, wanted: Sequence[TensorConfig], found: Sequence[onnxruntime.NodeArg]) -> None:
    """Raise ConfigError if the native backend would refuse the type or shape of a tensor of the graph.

    That one asks for a first dimension of any size, -1. The others must be as configured; where an input has -1 in the
    graph any configuration will do, but in an output -1 is not 29.
    """
    shapes = {tensor.name: [size if isinstance(size, int) else -1 for size in tensor.shape] for tensor in found}
    types = {tensor.name: tensor.type for tensor in found}
    for tensor in wanted:
        if DTYPES.get(ONNX_TYPES.get(types[tensor.name], "")) != tensor.dtype:
            raise ConfigError(
                f"{kind} {tensor.name!r} of {model!r} must be {tensor.dtype} in the graph, but is "
                f"{types[tensor.name]}; {AGAIN}, or change `data_type`"
            )
        shape, want = shapes[tensor.name], [-1] if tensor.is_ragged else [-1, *tensor.dims]
        agrees = len(shape) == len(want) and shape[0] == -1
        if not agrees or any(s != w and not (s == -1 and kind == "input") for s, w in zip(shape, want, strict=True)):
            advice = " (`allow_ragged_batch` makes it flat)" if tensor.is_ragged else ""
            raise ConfigError(
                f"{kind} {tensor.name!r} of {model!r} must have the shape {want} in the graph{advice}, "
                f"but has {shape}; {AGAIN}, or change `dims`"
            )
