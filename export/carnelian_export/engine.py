"""Build a TensorRT engine from the shaped graph, with optimisation profiles and a timing cache, and run it on a GPU.

The package `tensorrt` builds engines that Triton's backend loads. It must run on the GPU that will serve the engine,
and have the version of TensorRT in Triton's container. `tensorrt_rtx` has the same API and builds on machines without
a GPU: it shows that the graph is parsed, the profiles are accepted and an engine comes out, but Triton cannot load that
engine.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from carnelian_training.replacement import replaced
from torch import Tensor

from carnelian_export.graph.to_onnx import OUTPUTS
from carnelian_export.profiles import Shapes

logger = logging.getLogger(__name__)

SERVABLE, PORTABLE = "tensorrt", "tensorrt_rtx"
"""The names of TensorRT's Python packages, in the order in which they are tried."""


class EngineError(RuntimeError):
    """An engine cannot be built or run here, for example because TensorRT is not installed; the message says why."""


def load_tensorrt() -> Any:
    """Import the TensorRT package that is installed: `tensorrt`, or else `tensorrt_rtx`.

    Raises:
        EngineError: Neither package is installed, or the one that is does not load.
    """
    name = next(filter(importlib.util.find_spec, (SERVABLE, PORTABLE)), None)
    if name is not None:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:  # of its libraries, for example
            raise EngineError(f"{name} is installed, and must load, but does not: {error}; install it anew") from error
    raise EngineError(
        "TensorRT must be installed to build engines: `pip install tensorrt==VERSION` on a machine with the GPU, "
        "VERSION as in the Triton container that will serve; or, to try it without a GPU, "
        "`pip install 'carnelian-export[tensorrt]'`"
    )


def build_engine(
    graph: onnx.ModelProto, profiles: Sequence[Shapes], cache: Path | None = None, tf32: bool = False
) -> bytes:
    """Build an engine of a graph with optimisation profiles, and return it serialised.

    Args:
        graph: The shaped graph. Its types are kept as they are (a strongly typed network).
        profiles: At least one profile, as :func:`carnelian_export.profiles.shapes_of` gives them.
        cache: The file of kernel timings, read if it exists, and written. It is for one GPU and one version of
            TensorRT. TensorRT-RTX does not use it.
        tf32: Whether float32 numbers may be multiplied in TensorFloat-32, with 11 bits of precision as in float16.

    Raises:
        EngineError: TensorRT is not installed, or does not build the engine.
    """
    trt = load_tensorrt()
    log = _log_of(trt)
    try:
        builder = trt.Builder(log)
    except TypeError as error:  # the binding raises it where TensorRT returns a null pointer
        said = "; ".join(log.errors) or error
        raise EngineError(
            f"{trt.__name__} {trt.__version__} must find a GPU and its driver, but says: {said}"
        ) from error
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(graph.SerializeToString()):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise EngineError(f"{trt.__name__} {trt.__version__} must read the graph, but says: {errors}")
    config = builder.create_builder_config()
    if not tf32:
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, (least, tuned, most) in profile.items():
            shapes.set_shape(name, least, tuned, most)
        config.add_optimization_profile(shapes)
    if trt.__name__ == PORTABLE:
        if not torch.cuda.is_available():
            config.num_compute_capabilities = 1
            config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    elif cache is not None:  # TensorRT-RTX has no timing cache, and asks for a GPU if given one
        timings = config.create_timing_cache(cache.read_bytes() if cache.exists() else b"")
        if not config.set_timing_cache(timings, False):
            raise EngineError(
                f"{cache} must hold timings of this GPU and of {trt.__name__} {trt.__version__}, but is of others; "
                "name another file"
            )
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(f"{trt.__name__} {trt.__version__} must build the graph, but says: {'; '.join(log.errors)}")
    if trt.__name__ == PORTABLE:
        logger.warning(
            "built with TensorRT-RTX, which Triton cannot load: export with `tensorrt` installed to serve it%s",
            f"; TensorRT-RTX has no timing cache, so {cache} was not written" if cache is not None else "",
        )
    elif cache is not None:
        with replaced(cache) as partial:
            partial.write_bytes(bytes(config.get_timing_cache().serialize()))
    return bytes(plan)


_logs: dict[str, Any] = {}


def _log_of(trt: Any) -> Any:
    """Return the only logger of a TensorRT package, without errors: a package keeps the first logger that it gets."""
    if trt.__name__ not in _logs:

        class Log(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.errors: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    self.errors.append(message)

        _logs[trt.__name__] = Log()
    _logs[trt.__name__].errors.clear()
    return _logs[trt.__name__]


class EngineRun:
    """A built engine that runs on a GPU when called: tensors by name -> tensors by name. Nobody has run it yet."""

    def __init__(self, plan: bytes) -> None:
        self._trt = load_tensorrt()
        log = _log_of(self._trt)
        self._runtime = self._trt.Runtime(log)  # the engine must not outlive it
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineError(f"{self._trt.__name__} must load what it built, but says: {'; '.join(log.errors)}")
        self._context = self._engine.create_execution_context()

    def __call__(self, inputs: dict[str, Tensor], profile: int) -> dict[str, Tensor]:
        """Run one batch with the optimisation profile at index `profile`; the results are on the CPU."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._context.set_optimization_profile_async(profile, stream.cuda_stream)
        tensors = {name: value.cuda().contiguous() for name, value in inputs.items()}
        for name, value in tensors.items():
            if not self._context.set_input_shape(name, tuple(value.shape)):
                raise EngineError(f"profile {profile} must take {name} of shape {list(value.shape)}, but does not")
        for name, dtype in zip(OUTPUTS, (torch.float32, torch.int32), strict=True):
            tensors[name] = torch.empty(tuple(self._context.get_tensor_shape(name)), dtype=dtype, device="cuda")
        for name, value in tensors.items():
            self._context.set_tensor_address(name, value.data_ptr())
        torch.cuda.synchronize()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise EngineError("the engine must run a batch, but does not; TensorRT's log has the reason")
        stream.synchronize()
        return {name: tensors[name].cpu() for name in OUTPUTS}
