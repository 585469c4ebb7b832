"""What TensorRT changes in the configuration of the acoustic stage, as an engine or as ONNX Runtime's provider."""

import hashlib

from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.profiles import MAX_AUDIO_S, Profile, shapes_of

ENGINE_CACHE = "/tmp/tensorrt_engines"  # ONNX Runtime can make it, even in a container with a read-only root
ENGINE_PREFIX = "trt_engine_cache_prefix"


def use_tensorrt_provider(config: pb.ModelConfig, hop_samples: int) -> None:
    """Set ONNX Runtime's TensorRT provider up for the shaped graph, in place; without a GPU it runs on the CPU.

    One profile covers all batches: for shapes outside it, an engine would be built while clients wait.
    """
    _add_shapes(config)
    profile = Profile(rows=1, seconds=7.0, most_s=config.max_batch_size * MAX_AUDIO_S)
    *num_mels, _ = config.input[0].dims
    shapes = shapes_of(profile, config.max_batch_size, num_mels[0] if num_mels else None, hop_samples)
    parameters = {
        "precision_mode": "FP32",  # the graph's own types are kept; FP16 would let float32 parts run in float16
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": ENGINE_CACHE,
    }
    for position, end in enumerate(("min", "opt", "max")):
        parameters[f"trt_profile_{end}_shapes"] = ",".join(
            f"{name}:{'x'.join(map(str, three[position]))}" for name, three in shapes.items()
        )
    config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="tensorrt", parameters=parameters)


def name_cached_engines(config: pb.ModelConfig, graph: bytes) -> None:
    """Make ONNX Runtime cache the engines of this graph under a name of their own; changes `config` in place.

    ONNX Runtime's own names depend only on the graph's structure: it would take the engine of another network with the
    same layers for this one's (microsoft/onnxruntime#6455).
    """
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        accelerator.parameters[ENGINE_PREFIX] = f"{config.name}_{hashlib.sha256(graph).hexdigest()[:16]}"


def use_tensorrt_engine(config: pb.ModelConfig, num_profiles: int) -> None:
    """Make the acoustic stage run a TensorRT engine of the shaped graph; changes `config` in place."""
    config.backend = "tensorrt"
    config.parameters.clear()  # they are ONNX Runtime's
    # Triton's backend compares the flat tensor's only dimension with the first one here.
    config.input[0].dims[:] = [-1] * len(config.input[0].dims)
    _add_shapes(config)
    (instances,) = config.instance_group
    instances.kind = pb.ModelInstanceGroup.KIND_GPU
    instances.profile[:] = [str(position) for position in range(num_profiles)]


def _add_shapes(config: pb.ModelConfig) -> None:
    """Add the inputs that the shaped graph has in addition to those of the ragged graph."""
    batch_input = config.batch_input[0]
    for target, kind, data_type in (
        ("REQUEST_SIZES", pb.BatchInput.BATCH_ELEMENT_COUNT, pb.TYPE_INT32),
        ("LONGEST_REQUEST", pb.BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, pb.TYPE_FP32),
    ):
        config.batch_input.add(
            kind=kind, target_name=[target], data_type=data_type, source_input=batch_input.source_input
        )
