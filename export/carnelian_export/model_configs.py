"""The Triton configurations of one recogniser, as messages of Triton's own schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.features import SAMPLE_RATE_HZ
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from carnelian_export.profiles import STEPS, choose_profiles
from carnelian_export.target import Target
from carnelian_export.tensorrt_configs import use_tensorrt_engine, use_tensorrt_provider
from carnelian_export.tuning import StageTuning, apply_tuning, describe_tuning

Batches = Sequence[tuple[int, int]]
"""Warm-up batches, as (seconds, clips)."""
LONG_S = 20
"""The length of the long clips that stages are warmed up with, in seconds."""
SHORT_S = 2
"""The length of the short ones."""
ACOUSTIC_WARMUP: Batches = ((SHORT_S, 1), (SHORT_S, 4), (LONG_S, 1))
FEATURE_ROWS = 4
"""The most clips that `carnelian-serve` gives to DALI at once, unless `num_threads` is more."""
MAX_PENDING_REQUESTS = 128
"""The most requests that may wait for the stages after the features stage: as many clips as four batches have, or some
seconds of work on two cores."""
SOURCES = Path(__file__).parent / "models"
AUDIO_DECODE = "audio_decode"  # all recognisers share this stage

STAGES = ("features", "acoustic", "ctc")
SUFFIXES = ("", "_pcm", *(f"_{stage}" for stage in STAGES))

GPU_FEATURE_THREADS = 8
"""Threads of the features stage where the network runs on a GPU, which would wait for a single one
(helm/carnelian/docs/sizing.md)."""

_HEADER = "# Written by carnelian-export. A variant is a change of the parsed message, made by code.\n"


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """The sizes of a recogniser's tensors that differ from model to model."""

    features: tuple[int, ...]
    """Dimensions of FEATURES: [num_mels, -1], or [-1] of a waveform."""
    hop_samples: int
    """The number of samples from one frame of features to the next."""
    max_batch_size: int
    """The largest number of rows in a batch."""
    vocabulary: int
    """The number of labels, with the blank."""


def build_configs(
    name: str, sizes: TensorSizes, decoding: Mapping[str, str], target: Target
) -> dict[str, pb.ModelConfig]:
    """Build the five configurations of a recogniser, by folder name.

    Args:
        name: The public ensemble's name.
        sizes: The sizes of the recogniser's tensors.
        decoding: The parameters of the `_ctc` stage.
        target: The format, precision and provider of the `_acoustic` stage, and the tuning of all stages.
    """
    has_steps = target.provider == "cuda" and len(sizes.features) > 1  # Jasper's and QuartzNet's features have bands
    acoustic = build_acoustic(f"{name}_acoustic", sizes, batches_of_steps(sizes) if has_steps else ACOUSTIC_WARMUP)
    if target.precision == "int8":  # GPUs have no kernels for it; the stage would copy its tensors to and fro
        acoustic.instance_group[0].kind = pb.ModelInstanceGroup.KIND_CPU
    if target.provider == "tensorrt":
        use_tensorrt_provider(acoustic, sizes.hop_samples)
    if target.format == "tensorrt":
        use_tensorrt_engine(acoustic, len(choose_profiles(sizes.max_batch_size)))
    ctc = build_ctc(f"{name}_ctc", sizes, decoding)
    features = build_features(f"{name}_features", sizes, [acoustic.name, ctc.name], joins_requests=target.is_for_gpus)
    if target.is_for_gpus:
        apply_tuning(features, StageTuning(threads=GPU_FEATURE_THREADS))
    stages = [features, acoustic, ctc]
    for stage, config in zip(STAGES, stages, strict=True):
        apply_tuning(config, target.tuning.get(stage, StageTuning()))
    features.model_warmup.extend(_warm_up(batches_of_features(features), "SIGNAL", (), 1, "SIGNAL_LENGTH"))
    decode = read_config(SOURCES / AUDIO_DECODE / "config.pbtxt")
    configs = [
        build_ensemble(name, [decode, *stages], 1),
        build_ensemble(f"{name}_pcm", stages, sizes.max_batch_size),
        *stages,
    ]
    return {config.name: config for config in configs}


def build_features(
    name: str, sizes: TensorSizes, next_stages: Sequence[str], *, joins_requests: bool
) -> pb.ModelConfig:
    """Configure the features stage, SIGNAL -> FEATURES, on the CPU: clips of any lengths in one DALI batch.

    An ensemble has no back-pressure of its own, so this stage refuses requests while many wait for the stages after it.

    Triton's own DALI backend joins requests by a call to CUDA, which fails where there is no driver
    (triton-inference-server/server#7324). So the clips of a batch come from one request, unless `joins_requests`.
    """
    return pb.ModelConfig(
        name=name,
        backend="dali",
        default_model_filename="dali.py",
        max_batch_size=sizes.max_batch_size,
        input=[_input("SIGNAL", pb.TYPE_FP32, -1, is_ragged=True), _input("SIGNAL_LENGTH", pb.TYPE_INT32, 1)],
        output=[
            _output("FEATURES", pb.TYPE_FP32, *sizes.features),
            _output("FEATURE_LENGTH", pb.TYPE_INT32, 1),
        ],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        dynamic_batching=pb.ModelDynamicBatching(preferred_batch_size=[] if joins_requests else [1]),
        parameters={
            "max_pending_requests": pb.ModelParameter(string_value=str(MAX_PENDING_REQUESTS)),
            "pending_models": pb.ModelParameter(string_value=",".join(next_stages)),
        },
    )


def batches_of_features(features: pb.ModelConfig) -> Batches:
    """Return the warm-up batches of a tuned features stage: a short clip, then as many long ones as DALI gets at once.

    Where the stage keeps requests apart, these are one: Triton makes a batch of warm-up out of requests of one clip.
    """
    tuning = describe_tuning(features)
    rows = max(FEATURE_ROWS, tuning.threads or 0)
    return [(SHORT_S, 1), (LONG_S, 1 if tuning.preferred_batch == 1 else min(rows, features.max_batch_size))]


def build_acoustic(name: str, sizes: TensorSizes, warm_up: Batches) -> pb.ModelConfig:
    """Configure the acoustic stage, FEATURES -> LOG_PROBS: clips of any lengths in one batch, unpadded.

    The graph gets the shapes of the clips as another input. An instance runs the batches of `warm_up` first.
    """
    return pb.ModelConfig(
        name=name,
        backend="onnxruntime",
        max_batch_size=sizes.max_batch_size,
        input=[
            _input("FEATURES", pb.TYPE_FP32, *sizes.features, is_ragged=True),
            _input("FEATURE_LENGTH", pb.TYPE_INT32, 1),
        ],
        batch_input=[
            pb.BatchInput(
                kind=pb.BatchInput.BATCH_ITEM_SHAPE,
                target_name=["FEATURES_SHAPE"],
                data_type=pb.TYPE_INT32,
                source_input=["FEATURES"],
            )
        ],
        output=[
            _output("LOG_PROBS", pb.TYPE_FP32, -1, sizes.vocabulary),
            _output("LOG_PROB_LENGTH", pb.TYPE_INT32, 1),
        ],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_AUTO, count=1)],
        dynamic_batching=pb.ModelDynamicBatching(),  # no delay: it would not pay (perf/docs/batching.md)
        model_warmup=_warm_up(warm_up, "FEATURES", sizes.features[:-1], sizes.hop_samples, "FEATURE_LENGTH"),
        parameters={
            # Nearly every batch has a new shape. ONNX Runtime would keep a plan of its memory for each, and on a GPU
            # time every algorithm of each convolution; 1 is to choose by heuristics. Triton documents
            # `gpu_execution_accelerator` for this, but obeys a parameter alone (triton-inference-server/server#8808).
            "enable_mem_pattern": pb.ModelParameter(string_value="0"),
            "cudnn_conv_algo_search": pb.ModelParameter(string_value="1"),
        },
    )


def batches_of_steps(sizes: TensorSizes) -> Batches:
    """Return a batch for each of :data:`STEPS`: a short clip, then as many long ones as just exceed the step before."""
    frames = LONG_S * SAMPLE_RATE_HZ // sizes.hop_samples
    return [(SHORT_S, 1), *((LONG_S, min(step // frames + 1, sizes.max_batch_size)) for step in STEPS[:-1])]


def build_ctc(name: str, sizes: TensorSizes, parameters: Mapping[str, str]) -> pb.ModelConfig:
    """Configure the decoder stage, LOG_PROBS -> TRANSCRIPT and RESULT.

    `parameters` are the default options of the decoder and the file names of its language models.
    """
    return pb.ModelConfig(
        name=name,
        backend="python",
        max_batch_size=sizes.max_batch_size,
        input=[
            _input("LOG_PROBS", pb.TYPE_FP32, -1, sizes.vocabulary, is_ragged=True),
            _input("LOG_PROB_LENGTH", pb.TYPE_INT32, 1),
        ],
        output=[_output("TRANSCRIPT", pb.TYPE_STRING, 1), _output("RESULT", pb.TYPE_STRING, 1)],
        instance_group=[pb.ModelInstanceGroup(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)],
        dynamic_batching=pb.ModelDynamicBatching(),
        parameters={key: pb.ModelParameter(string_value=value) for key, value in parameters.items()},
    )


def build_ensemble(name: str, stages: list[pb.ModelConfig], max_batch_size: int) -> pb.ModelConfig:
    """Chain stages by their tensors' names, from the first one's inputs to the last one's outputs."""
    steps = [
        pb.ModelEnsembling.Step(
            model_name=stage.name,
            model_version=-1,
            input_map={tensor.name: tensor.name for tensor in stage.input},
            # All of them: the native DALI backend wants every output requested.
            output_map={tensor.name: tensor.name for tensor in stage.output},
        )
        for stage in stages
    ]
    return pb.ModelConfig(
        name=name,
        platform="ensemble",
        max_batch_size=max_batch_size,
        input=[_input(tensor.name, tensor.data_type, *tensor.dims) for tensor in stages[0].input],
        output=stages[-1].output,
        ensemble_scheduling=pb.ModelEnsembling(step=steps),
    )


def to_text(config: pb.ModelConfig) -> str:
    """Return a configuration as the text of a `config.pbtxt`."""
    text: str = text_format.MessageToString(config)
    return _HEADER + text


def read_config(path: Path) -> pb.ModelConfig:
    """Parse a `config.pbtxt`.

    Raises:
        ValueError: The file is not a model's configuration.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a model's configuration, but is none: {error}; mend or delete it") from error


def warmup_lengths(hop_samples: int) -> dict[str, int]:
    """Return the length, in hops, that each file in a stage's `warmup` folder holds; by file name.

    Triton can fill warm-up inputs with zeros, but a length of zero would warm nothing up.
    """
    return {f"length_{seconds}s": seconds * SAMPLE_RATE_HZ // hop_samples for seconds in (SHORT_S, LONG_S)}


def _warm_up(batches: Batches, name: str, rows: Sequence[int], hop_samples: int, length: str) -> list[pb.ModelWarmup]:
    """Return batches of silent clips that an instance runs before it is ready, twice because DALI has two buffers."""
    sample = pb.ModelWarmup.Input
    sizes = warmup_lengths(hop_samples)
    return [
        pb.ModelWarmup(
            name=f"{clips}_of_{seconds}s",
            batch_size=clips,
            count=2,
            inputs={
                name: sample(data_type=pb.TYPE_FP32, dims=[*rows, sizes[f"length_{seconds}s"]], zero_data=True),
                length: sample(data_type=pb.TYPE_INT32, dims=[1], input_data_file=f"length_{seconds}s"),
            },
        )
        for seconds, clips in batches
    ]


def _input(name: str, data_type: int, *dims: int, is_ragged: bool = False) -> pb.ModelInput:
    return pb.ModelInput(name=name, data_type=data_type, dims=dims, allow_ragged_batch=is_ragged)


def _output(name: str, data_type: int, *dims: int) -> pb.ModelOutput:
    return pb.ModelOutput(name=name, data_type=data_type, dims=dims)
