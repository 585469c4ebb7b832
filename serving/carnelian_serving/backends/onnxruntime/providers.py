"""ONNX Runtime's execution providers on GPUs, as `gpu_execution_accelerator` asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from carnelian_serving.backends.model_config import ConfigError, ModelConfig


def gpu_providers(config: ModelConfig, device_id: str, available: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Chooses the providers of a GPU instance, as the native backend does, with their options.

    Args:
        config: Its `gpu_execution_accelerator` names are `cuda` and, before it, `tensorrt`.
        device_id: Of the GPU.
        available: The providers of the installed ONNX Runtime; others are left out.

    Raises:
        ConfigError: An accelerator or one of its parameters is not known here.
    """
    if unknown := sorted(set(config.gpu_accelerators) - {"cuda", "tensorrt"}):
        raise ConfigError(
            f"`gpu_execution_accelerator` of {config.name!r} must be cuda or tensorrt, but is {', '.join(unknown)}"
        )
    chosen = []
    if "tensorrt" in config.gpu_accelerators:
        chosen.append(("TensorrtExecutionProvider", _tensorrt_options(config)))
    chosen.append(("CUDAExecutionProvider", dict(config.gpu_accelerators.get("cuda", {}))))
    return [(name, {"device_id": device_id, **options}) for name, options in chosen if name in available]


def _tensorrt_options(config: ModelConfig) -> dict[str, str]:
    options = {}
    for key, value in config.gpu_accelerators["tensorrt"].items():
        if key.startswith("trt_"):
            options[key] = value
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
