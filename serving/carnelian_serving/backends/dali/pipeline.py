"""A DALI pipeline as a function of one batch: rows in, rows out, usable again after an error."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from nvidia import dali
from nvidia.dali.backend import TensorListGPU

from carnelian_serving.backends.dali.core import list_threads, shared_core
from carnelian_serving.backends.model_config import Array, ConfigError, ModelConfig

_DALI: Any = dali  # its stubs leave most of Pipeline untyped
FALLBACK_FILENAME = "dali.py"
_OPERATOR_ERROR = re.compile(
    r"Error in \w+ operator `(?P<operator>[^`]+)`.*?\nencountered:\n\n(?P<words>.*?)"
    r"(?=\nC\+\+ context:|\nCurrent pipeline object|$)",
    re.DOTALL,
)
TOO_LITTLE_MEMORY = "too little memory for an input of this length, or of the length that it claims; send less at once"


class PipelineRunner:
    """A serialised pipeline that runs batches."""

    def __init__(
        self, serialized: bytes, *, max_batch_size: int, num_threads: int | None, device_id: int | None
    ) -> None:
        """Build the pipeline.

        Args:
            serialized: What `Pipeline.serialize` gives.
            max_batch_size: Rows in a batch.
            num_threads: None keeps the pipeline's own.
            device_id: None for the CPU alone.
        """
        self._serialized = serialized
        self._options: dict[str, Any] = {
            "batch_size": max_batch_size,
            "device_id": device_id,
            # One batch in, one batch out.
            "prefetch_queue_depth": 1,
            "exec_async": False,
            "exec_pipelined": False,
        }
        if num_threads is not None:
            self._options["num_threads"] = num_threads
        self._threads: set[int] = set()
        self._pipeline: Any = self._build()
        self.num_outputs: int = self._pipeline.num_outputs
        """The number of outputs of the pipeline."""
        self.num_threads: int = self._pipeline.num_threads
        """The number of threads that work on a batch."""

    def has_input(self, name: str) -> bool:
        """Return whether the pipeline has an external source of this name."""
        try:
            self._pipeline.input_feed_count(name)
        except RuntimeError:
            return False
        return True

    def make_ready(self) -> None:
        """Build the pipeline if an error has ended the last one."""
        if self._pipeline is None:
            self._pipeline = self._build()

    def run(self, inputs: Mapping[str, Sequence[Array]]) -> list[list[Array]]:
        """Run one batch.

        Args:
            inputs: The rows of each external source, by its name.

        Returns:
            The rows of each output: views of DALI's memory, valid until the next call.

        Raises:
            RuntimeError: DALI's error, in its words.
        """
        self.make_ready()
        try:
            for name, rows in inputs.items():
                self._pipeline.feed_input(name, list(rows))
            with shared_core(self._threads) if self._threads else contextlib.nullcontext():
                outputs = self._pipeline.run()
            return [self._rows(output) for output in outputs]
        except Exception as error:  # C++'s own too: too little memory is a MemoryError, an absurd size a ValueError
            self._pipeline = None  # DALI: "Current pipeline object is no longer valid."
            raise RuntimeError(summarise_error(str(error))) from error

    @staticmethod
    def _rows(output: Any) -> list[Array]:
        if isinstance(output, TensorListGPU):
            output = output.as_cpu()
        return [np.asarray(output.at(index)) for index in range(len(output))]

    def _build(self) -> Any:
        threads = list_threads()
        pipeline = _DALI.Pipeline.deserialize(self._serialized, **self._options)
        if pipeline.num_threads == 1 and pipeline.device_id is None:
            self._threads = list_threads() - threads
        return pipeline


def summarise_error(text: str) -> str:
    """Return the operator and DALI's message, without the traceback, which names the server's files."""
    match = _OPERATOR_ERROR.search(text)
    words = match["words"].strip() if match else text
    if words == "std::bad_alloc":
        words = TOO_LITTLE_MEMORY
    return f"DALI operator {match['operator']}: {words}" if match else words


def load_serialized(config: ModelConfig) -> bytes:
    """Return the model's pipeline, serialised; it is looked for in the places where the native backend looks.

    That is `default_model_filename` (`model.dali`), serialised or Python source, then `dali.py`.

    Raises:
        ConfigError: None of these files exists, or the source has not exactly one `@autoserialize` pipeline.
    """
    path = config.folder / config.model_filename
    if path.is_file() and path.suffix != ".py":
        return path.read_bytes()
    source = path if path.is_file() else config.folder / FALLBACK_FILENAME
    if not source.is_file():
        raise ConfigError(f"{config.name!r} must have a pipeline, but neither {path} nor {source} is there")
    return _autoserialize(source, config.name)


def _autoserialize(source: Path, name: str) -> bytes:
    # The native backend calls this too.
    autoserialize: Any = importlib.import_module("nvidia.dali._utils.autoserialize")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "model.dali")
        try:
            autoserialize.invoke_autoserialize(_import(source), str(target))
        except RuntimeError as error:
            raise ConfigError(f"{source} of {name!r} cannot be serialised: {error}") from error
        return target.read_bytes()


def _import(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("carnelian_dali_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the module of their annotations
    sys.dont_write_bytecode = True  # a model repository is not the place for __pycache__
    spec.loader.exec_module(module)
    return module
