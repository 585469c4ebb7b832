"""ONNX Runtime's execution providers on GPUs, as `gpu_execution_accelerator` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from carnelian_serving.backends.model_config import ConfigError, ModelConfig

CONVOLUTION_SEARCH = "cudnn_conv_algo_search"
"""A parameter as well as an option of `cuda`: Triton overwrites the option with the parameter, or with 0."""
CONVOLUTION_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
"""ONNX Runtime's words for the parameter's 0, 1 and 2."""

_BOOLEANS = {
    *("trt_detailed_build_log", "trt_dump_subgraphs", "trt_dump_ep_context_model", "trt_engine_hw_compatible"),
    *("trt_force_sequential_engine_build", "trt_force_timing_cache", "trt_layer_norm_fp32_fallback"),
    "trt_int8_use_native_calibration_table",
}
"""Options that are yes or no, besides those whose names end in `_enable`."""

Provider = tuple[str, dict[str, str]]
"""Its name and its options."""


def open_session(
    path: Path, options: onnxruntime.SessionOptions, providers: Sequence[Provider]
) -> onnxruntime.InferenceSession:
    """Open a session whose first provider is the first of these: ONNX Runtime would go on without it, in silence.

    Raises:
        ConfigError: It cannot be loaded.
    """
    session = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    wanted, found = providers[0][0], session.get_providers()[0]
    if found != wanted:
        raise ConfigError(
            f"{path} must run on ONNX Runtime's {wanted}, but that cannot be loaded, and {found} would take its place: "
            "install the CUDA, cuDNN and TensorRT that the log asks for, or set `KIND_CPU`"
        )
    return session


def gpu_providers(config: ModelConfig, device_id: str, available: Sequence[str]) -> list[Provider]:
    """Choose the providers of a GPU instance, as the native backend does, with their options.

    Args:
        config: Its `gpu_execution_accelerator` names are `cuda` and, before it, `tensorrt`; :data:`CONVOLUTION_SEARCH`
            may be among its parameters.
        device_id: Of the GPU.
        available: The providers of the installed ONNX Runtime; others are left out.

    Raises:
        ConfigError: An accelerator or one of its parameters is not known here, or a parameter has no meaning.
    """
    if unknown := sorted(set(config.gpu_accelerators) - {"cuda", "tensorrt"}):
        raise ConfigError(
            f"`gpu_execution_accelerator` of {config.name!r} must be cuda or tensorrt, but is {', '.join(unknown)}"
        )
    chosen = []
    if "tensorrt" in config.gpu_accelerators:
        chosen.append(("TensorrtExecutionProvider", _tensorrt_options(config)))
    chosen.append(("CUDAExecutionProvider", {**config.gpu_accelerators.get("cuda", {}), **_convolution_search(config)}))
    return [(name, {"device_id": device_id, **options}) for name, options in chosen if name in available]


def _convolution_search(config: ModelConfig) -> dict[str, str]:
    if CONVOLUTION_SEARCH not in config.parameters:
        return {}
    number = config.integer(CONVOLUTION_SEARCH, 0)
    if number not in range(len(CONVOLUTION_SEARCHES)):
        raise ConfigError(f"parameter {CONVOLUTION_SEARCH!r} of {config.name!r} must be 0, 1 or 2, but is {number}")
    return {CONVOLUTION_SEARCH: CONVOLUTION_SEARCHES[number]}


def _tensorrt_options(config: ModelConfig) -> dict[str, str]:
    options = {}
    for key, value in config.gpu_accelerators["tensorrt"].items():
        if key.startswith("trt_"):
            # The native backend takes 1 for true as well, ONNX Runtime's Python package does not.
            is_boolean = key.endswith("_enable") or key in _BOOLEANS
            options[key] = {"1": "True", "0": "False"}.get(value, value) if is_boolean else value
        elif key == "max_workspace_size_bytes":
            options["trt_max_workspace_size"] = value
        elif key == "precision_mode" and value in ("FP32", "FP16"):
            options["trt_fp16_enable"] = str(value == "FP16")
        else:
            raise ConfigError(
                f"parameters of `tensorrt` in {config.name!r} must be trt_..., max_workspace_size_bytes or "
                f"precision_mode FP32 or FP16, but there is {key} {value}"
            )
    return options
