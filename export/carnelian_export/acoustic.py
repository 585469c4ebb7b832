"""Write the model file of the `<model>_acoustic` stage, and compare it with the network before it can be served."""

import shutil
import tempfile
from pathlib import Path

import onnx
import torch
from carnelian_training.config import Config
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.precision import DTYPES

from carnelian_export.engine import EngineRun, build_engine
from carnelian_export.graph.quantise import quantise, read_features
from carnelian_export.graph.shaped import build_shaped, export_shaped
from carnelian_export.graph.stepped import export_stepped
from carnelian_export.graph.to_onnx import OUTPUTS, export_ragged
from carnelian_export.parity import ClipFeatures, Scores, check_distributions, check_parity, compare, make_inputs
from carnelian_export.profiles import SHAPED_INPUTS, choose_profiles, shapes_of
from carnelian_export.target import Target, TargetError

MOST_BYTES = 2**31 - 2**24
"""The most bytes of weights in one ONNX file: it is a protobuf message, which must be below 2 GiB with its nodes."""


def write_acoustic(folder: Path, network: CtcNetwork, config: Config, target: Target, max_batch_size: int) -> float:
    """Export a network as `model.onnx` (see :func:`save`) or `model.plan`, and compare the file with the network.

    Args:
        folder: The version folder of the stage; the file is written into it.
        network: In evaluation mode, in float32.
        config: The network's configuration.
        target: The format and precision of the file, and what runs it.
        max_batch_size: The largest number of rows in a batch.

    Returns:
        The largest difference between log-probabilities of the file and of the network, in proportion for those below
        :data:`~carnelian_export.parity.UNLIKELY`; for int8, the mean distance between their distributions over the
        labels, 0 to 2.

    Raises:
        ParityError: The file and the network differ by more than the precision explains.
        EngineError: TensorRT is not installed, or does not build the engine.
        QuantisationError: There are no clips to calibrate on.
        TargetError: The network is too large for TensorRT in this precision.
        TypeError: The network is of a class, or has blocks, that cannot be exported.
        ValueError: The network is in training mode.
    """
    if not isinstance(network, (StackNetwork, Wav2Vec2)):
        raise TypeError(
            f"a network to export must be a StackNetwork or Wav2Vec2, but is of class {type(network).__name__}"
        )
    if network.training:
        raise ValueError("`network` must be in evaluation mode, but is in training mode; call network.eval()")
    _check_size(network, target)
    if target.format == "tensorrt":
        return _write_engine(folder / "model.plan", network, target, max_batch_size, config.features.hop_samples)
    path, name = folder / "model.onnx", folder.parent.name
    if target.int8_clips is not None:
        clips = read_features(target.int8_clips, config)
        save(quantise(network, clips.calibration), path)
        return check_distributions(path, network, clips.comparison, name)
    dtype = DTYPES[target.precision]
    if target.provider == "tensorrt":
        graph = export_shaped(network, dtype, config.features.hop_samples)
    elif target.provider == "cuda" and isinstance(network, StackNetwork):
        graph = export_stepped(network, dtype)
    else:
        graph = export_ragged(network, dtype)
    save(graph, path)
    del graph  # the comparison needs memory of its own
    return check_parity(path, network, target.precision, name)


def save(graph: onnx.ModelProto, path: Path) -> None:
    """Write a graph to a file; weights of over :data:`MOST_BYTES` go into a second file beside it, `<path>.data`.

    Args:
        graph: The graph to write. It loses the weights that go into the second file.
        path: The first file. Neither file may exist.
    """
    weights = path.with_name(f"{path.name}.data")
    is_large = sum(len(tensor.raw_data) for tensor in graph.graph.initializer) > MOST_BYTES
    onnx.save(graph, path, save_as_external_data=is_large, location=weights.name)
    if is_large:
        shutil.copymode(path, weights)  # onnx 1.23 lets only the owner read it; a server may run as another user


def _check_size(network: CtcNetwork, target: Target) -> None:
    """Refuse a network over 2 GiB for targets that need all weights in one file, before it is traced for minutes."""
    if target.format == "onnx" and target.provider != "tensorrt":
        return
    number = sum(parameter.numel() for parameter in network.parameters())
    # For the other precisions, a graph in float32 is made first: to convert it, or to compare it with the network.
    kept, size = ("fp16", 2) if target.precision == "fp16" else ("fp32", 4)
    if number * size > MOST_BYTES:
        advice = "; export with `--precision fp16`" if size > 2 and number * 2 <= MOST_BYTES else ""
        raise TargetError(
            "for TensorRT a network must take less than 2 GiB, but the parameters of this one take "
            f"{number * size / 2**30:.2f} GiB in {kept}{advice}"
        )


def _write_engine(path: Path, network: CtcNetwork, target: Target, max_batch_size: int, hop_samples: int) -> float:
    dtype = DTYPES[target.precision]
    graph = export_shaped(network, dtype, hop_samples)
    name = path.parents[1].name
    difference = _check_graph(network, target.precision, graph, hop_samples, name)
    num_mels = network.config.num_mels if isinstance(network, StackNetwork) else None
    chosen = choose_profiles(max_batch_size)
    profiles = [shapes_of(profile, max_batch_size, num_mels, hop_samples) for profile in chosen]
    plan = build_engine(graph, profiles, target.timing_cache)
    path.write_bytes(plan)
    if torch.cuda.is_available():
        run = EngineRun(plan)
        for position in range(len(profiles)):

            def score(clips: list[ClipFeatures], lengths: list[int], position: int = position) -> Scores:
                tensors = {name: torch.from_numpy(value) for name, value in make_inputs(clips, lengths).items()}
                found = run(tensors, position)
                return found[OUTPUTS[0]].numpy(), found[OUTPUTS[1]].numpy()

            found = compare(score, network, target.precision, f"{name} in TensorRT, profile {position}")
            difference = max(difference, found)
    return difference


def _check_graph(network: CtcNetwork, precision: str, graph: onnx.ModelProto, hop_samples: int, name: str) -> float:
    """Compare the graph that TensorRT reads with the network, in ONNX Runtime.

    ONNX Runtime has no bfloat16. So for bf16 the graph is compared in float32, and the network in bfloat16 in PyTorch.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        if precision != "bf16":
            onnx.save(graph, path)
            return check_parity(path, network, precision, name)
        onnx.save(export_shaped(network, torch.float32, hop_samples), path)
        check_parity(path, network, name=name)
    module = build_shaped(network, torch.bfloat16, hop_samples)

    @torch.inference_mode()
    def score(clips: list[ClipFeatures], lengths: list[int]) -> Scores:
        inputs = make_inputs(clips, lengths)
        log_probs, ends = module(*(torch.from_numpy(inputs[name]) for name in SHAPED_INPUTS))
        return log_probs.numpy(), ends.numpy()

    return compare(score, network, precision, f"{name} in bfloat16")
