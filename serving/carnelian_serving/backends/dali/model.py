"""The `dali` backend: `model.dali` or an `@autoserialize` pipeline through the Python package `nvidia.dali`.

Outputs are matched to the configuration by position, and a request's rows go in as samples, as in the native
backend. That one copies a request's rows densely and without a check, so rows of unequal shape corrupt the
answer; here they are an error.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carnelian_serving.backends.batching import Batches, Rows, check_output
from carnelian_serving.backends.dali import admission
from carnelian_serving.backends.dali.decode_errors import DecodeErrors
from carnelian_serving.backends.dali.pipeline import TOO_LITTLE_MEMORY, PipelineRunner, load_serialized
from carnelian_serving.backends.model_config import Array, ConfigError, read_model_config
from carnelian_serving.backends.parts import MAX_RUN_ROWS, split
from carnelian_serving.backends.threads import thread_count

PARAMETERS = ("num_threads", "memory_mib", *admission.PARAMETERS)
INPUT_COPIES = 3
"""The number of copies of an input to have memory for. DALI makes two. libsndfile makes a third of a file whose format
it does not know, and crashes without memory for it: a film of 300 MB would end the server."""
LEAST_MEMORY_MIB = 16
"""The least memory that an instance may be given: with much less it fails in its warm-up, or crashes, and then
tritonserver 2.51 does too."""
DECODER = b"decoders__"
"""How the names of DALI's decoders begin in a serialised pipeline."""


class TritonPythonModel:
    """One instance of a DALI pipeline."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add what the native backend adds: dynamic batching, also of requests of different lengths."""
        config.set_dynamic_batching()
        for tensor in config.as_dict()["input"]:
            tensor["allow_ragged_batch"] = True
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Build the pipeline.

        Raises:
            ConfigError: The configuration does not agree with it.
        """
        folder = Path(args["model_repository"], args["model_version"])
        self._config = read_model_config(
            args["model_config"], folder, known_parameters=PARAMETERS, default_filename="model.dali"
        )
        if self._config.batch_inputs:
            raise ConfigError(f"`batch_input` of {self._config.name!r} has no meaning for DALI; take it out")
        memory_mib = self._config.integer("memory_mib")
        if memory_mib != 0 and memory_mib < LEAST_MEMORY_MIB:
            raise ConfigError(
                f"parameter 'memory_mib' of {self._config.name!r} must be 0, for no bound, or at least "
                f"{LEAST_MEMORY_MIB}, but is {memory_mib}"
            )
        on_gpu = args["model_instance_kind"] == "GPU"
        serialized = load_serialized(self._config)
        self._errors = DecodeErrors(self._config.name) if DECODER in serialized else None
        self._pipeline = PipelineRunner(
            serialized,
            max_batch_size=self._config.max_batch_size,
            num_threads=thread_count(self._config, "num_threads") or None,
            device_id=int(args["model_instance_device_id"]) if on_gpu else None,
        )
        self._most_rows = self._config.max_batch_size if on_gpu else max(MAX_RUN_ROWS, self._pipeline.num_threads)
        self._check_pipeline()
        self._admission = admission.read_admission(self._config)
        self._most_bytes = _used_bytes() + (memory_mib << 20) if memory_mib else None
        self._most_input_bytes = (memory_mib << 20) // INPUT_COPIES
        self._batches = Batches(self._config, self._run, split=self._split, error_code="UNKNOWN")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, a few at a time, or refuse them all."""
        if self._admission is not None and not self._admission.admit(len(requests)):
            return [self._admission.refuse() for _ in requests]
        return self._batches.execute(requests)

    def finalize(self) -> None:
        """Free the pipeline."""
        del self._pipeline

    def _split(self, inputs: Rows) -> Iterator[slice]:
        counts = [len(array) for array in next(iter(inputs.values()))]
        return split(counts, self._most_rows)

    def _run(self, inputs: Rows) -> Rows:
        counts = [len(array) for array in next(iter(inputs.values()))]
        samples_of = {name: [row for array in arrays for row in array] for name, arrays in inputs.items()}
        self._pipeline.make_ready()  # its threads count against the bound
        held_bytes = sum(array.nbytes for arrays in inputs.values() for array in arrays)
        try:
            if self._most_bytes and held_bytes > self._most_input_bytes:
                raise ValueError(TOO_LITTLE_MEMORY)
            with _bounded(self._most_bytes + held_bytes) if self._most_bytes else contextlib.nullcontext():
                outputs = self._pipeline.run(samples_of)
        except Exception as error:
            if self._errors is not None and len(counts) == 1:  # each request of a larger batch runs again by itself
                self._errors.count(held_bytes, str(error))
            raise
        rows: Rows = {}
        ends = np.cumsum(counts)
        for position, samples in enumerate(outputs):
            for sample in samples:
                check_output(self._config, position, sample.shape, sample.dtype)
            rows[self._config.outputs[position].name] = [
                self._stack(position, samples[end - count : end]) for count, end in zip(counts, ends, strict=True)
            ]
        return rows

    def _stack(self, position: int, samples: Sequence[Array]) -> Array:
        """Make the tensor of one request from its rows.

        Raises:
            ValueError: The rows differ in shape.
        """
        if len(samples) == 1:
            return samples[0][np.newaxis]
        shapes = {sample.shape for sample in samples}
        if len(shapes) > 1:
            raise ValueError(
                f"output {self._config.outputs[position].name!r} of {self._config.name!r} must have rows "
                f"of one shape within a request, but has {sorted(shapes)}; let it follow from the input's "
                "shape alone"
            )
        return np.stack(samples)

    def _check_pipeline(self) -> None:
        config = self._config
        for tensor in config.inputs:
            if not self._pipeline.has_input(tensor.name):
                raise ConfigError(
                    f"input {tensor.name!r} of {config.name!r} must be an external source of the "
                    "pipeline, but there is none of this name"
                )
        if self._pipeline.num_outputs != len(config.outputs):
            raise ConfigError(
                f"{config.name!r} must have the {self._pipeline.num_outputs} outputs of the pipeline, in its "
                f"order, but the configuration has {len(config.outputs)}"
            )


def _used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


@contextlib.contextmanager
def _bounded(most_bytes: int) -> Iterator[None]:
    """Bound what this process may hold meanwhile: a file may claim any length, and decoders believe it.

    Not always: where Triton's stub finds no memory for a request, it crashes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    within = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (within, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
