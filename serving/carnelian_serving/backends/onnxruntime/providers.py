"""Chooses ONNX Runtime's execution providers on GPUs, as `gpu_execution_accelerator` asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime

from carnelian_serving.backends.model_config import ConfigError, ModelConfig
from carnelian_serving.backends.onnxruntime.version import parse_version

CUDA_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "gpu_mem_limit": (),
    "do_copy_in_default_stream": (),
}
"""Options of `cuda` that a model can also set as parameters; ONNX Runtime's values for the parameter's 0, 1 and 2."""

_PRECISIONS = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "True"},
    "BF16": {"trt_bf16_enable": "True"},
    "INT8": {"trt_int8_enable": "True"},
}
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""ONNX Runtime's names of options that have another name in Triton."""
_TENSORRT_BOOLEANS = {
    *("trt_build_heuristics_enable", "trt_context_memory_sharing_enable", "trt_cuda_graph_enable"),
    *("trt_detailed_build_log", "trt_dla_enable", "trt_dump_ep_context_model", "trt_dump_subgraphs"),
    *("trt_engine_cache_enable", "trt_force_sequential_engine_build", "trt_force_timing_cache"),
    *("trt_layer_norm_fp32_fallback", "trt_sparsity_enable", "trt_timing_cache_enable"),
    "int8_use_native_calibration_table",
}
_TENSORRT_OPTIONS = _TENSORRT_BOOLEANS | {
    *("max_workspace_size_bytes", "int8_calibration_table_name", "trt_auxiliary_streams", "trt_dla_core"),
    *("trt_builder_optimization_level", "trt_engine_cache_path", "trt_engine_cache_prefix"),
    *("trt_ep_context_embed_mode", "trt_ep_context_file_path", "trt_extra_plugin_lib_paths"),
    *("trt_max_partition_iterations", "trt_min_subgraph_size", "trt_tactic_sources", "trt_timing_cache_path"),
    *("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"),
}
"""The options that Triton's own backend knows, besides `precision_mode`; it refuses all others."""

STEPS_KEY = "time_axis_frames"
"""A key in the metadata of a graph whose convolutions see few shapes, however the batches differ."""
Provider = tuple[str, dict[str, str]]
"""The name of a provider and its options."""


def open_session(
    path: Path, options: onnxruntime.SessionOptions, providers: Sequence[Provider]
) -> onnxruntime.InferenceSession:
    """Open a session with these providers; an error if the first cannot be used, which ONNX Runtime would only log.

    Raises:
        ConfigError: It cannot be loaded.
    """
    if len(providers) > 1:
        load_cuda()
    session = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    wanted, found = providers[0][0], session.get_providers()[0]
    if found != wanted:
        raise ConfigError(
            f"{path} must run on ONNX Runtime's {wanted}, but that cannot be loaded, and {found} would take its place: "
            "install the CUDA, cuDNN and TensorRT that the log asks for, or set `KIND_CPU`"
        )
    return session


def load_cuda() -> None:
    """Load CUDA and cuDNN of pip's packages, which the dynamic linker does not find."""
    if hasattr(onnxruntime, "preload_dlls"):  # since 1.21
        onnxruntime.preload_dlls()


def prepares_each_shape(version: str) -> bool:
    """Whether the CUDA provider of this ONNX Runtime keeps what it prepared for the last shape alone.

    It does since it uses cuDNN's frontend, in 1.20 (microsoft/onnxruntime#23006).
    """
    return parse_version(version) >= (1, 20)


def gpu_providers(config: ModelConfig, device_id: str, available: Sequence[str]) -> list[Provider]:
    """Choose the providers of a GPU instance, as the native backend does, with their options.

    Args:
        config: Its `gpu_execution_accelerator` names are `cuda` and, before it, `tensorrt`; :data:`CUDA_PARAMETERS`
            may be among its parameters.
        device_id: Of the GPU.
        available: The providers of the installed ONNX Runtime; others are left out.

    Raises:
        ConfigError: An accelerator or one of its options is not known, would be overwritten, or has no meaning.
    """
    if unknown := sorted(set(config.gpu_accelerators) - {"cuda", "tensorrt"}):
        raise ConfigError(
            f"`gpu_execution_accelerator` of {config.name!r} must be cuda or tensorrt, but is {', '.join(unknown)}"
        )
    chosen = []
    if "tensorrt" in config.gpu_accelerators:
        chosen.append(("TensorrtExecutionProvider", _tensorrt_options(config)))
    chosen.append(("CUDAExecutionProvider", _cuda_options(config)))
    return [(name, {"device_id": device_id, **options}) for name, options in chosen if name in available]


def _cuda_options(config: ModelConfig) -> dict[str, str]:
    options = dict(config.gpu_accelerators.get("cuda", {}))
    if config.parameters and (lost := sorted(options.keys() & CUDA_PARAMETERS.keys())):
        raise ConfigError(
            f"{', '.join(lost)} of {config.name!r} must be among its `parameters`: where a model has any, Triton's own "
            "backend overwrites such options of `cuda`"
        )
    for key, words in CUDA_PARAMETERS.items():
        if key in config.parameters and words:
            number = config.integer(key)
            if number not in range(len(words)):
                raise ConfigError(
                    f"parameter {key!r} of {config.name!r} must be from 0 to {len(words) - 1}, but is {number}"
                )
            options[key] = words[number]
        elif key in config.parameters:
            options[key] = config.parameters[key]
    return options


def _tensorrt_options(config: ModelConfig) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in config.gpu_accelerators["tensorrt"].items():
        if key == "precision_mode" and value in _PRECISIONS:
            options |= _PRECISIONS[value]
        elif key in _TENSORRT_OPTIONS:
            # The native backend also accepts 1 for true; ONNX Runtime's Python package does not.
            words = {"1": "True", "0": "False"} if key in _TENSORRT_BOOLEANS else {}
            options[_TENSORRT_NAMES.get(key, key)] = words.get(value, value)
        else:
            raise ConfigError(
                f"parameters of `tensorrt` in {config.name!r} must be precision_mode, {', '.join(_PRECISIONS)}, or "
                f"among {', '.join(sorted(_TENSORRT_OPTIONS))}, but there is {key} {value}"
            )
    return options
