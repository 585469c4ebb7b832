"""Quantise a graph to int8 for CPUs.

The convolutions of Jasper and QuartzNet compute in integers, with scales measured on calibration clips, which are
constants of the graph. Scales computed from each batch as it comes would be simpler, but then a clip's
transcript would depend on its neighbours.

Weights use 7 of their 8 bits: x86 CPUs without VNNI add two products in 16 bits, which 8-bit weights would overflow.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from carnelian_training.config import Config
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.data.plan import Item
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.waveform import WaveformSettings
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from carnelian_export.graph.folding import fold_batch_norms
from carnelian_export.graph.frame_scales import quantise_products
from carnelian_export.graph.to_onnx import INPUTS, RaggedAcoustic, store_as_float16, trace_ragged, trace_waveforms
from carnelian_export.parity import ClipFeatures, make_inputs

MOST_CLIPS = 64
"""The largest number of clips to calibrate on: with more, the ranges hardly grow."""
LEAST_S = 5.0
"""The least sound to calibrate on, in seconds. Scales measured on less fit only that sound: with scales of 1 s of
speech, the distance between distributions over the labels was 0.1 on other clips, and with scales of 0.3 s or of
silence 1.0, where 2 is the maximum."""
PIECE_FRAMES = 500
"""The least length, in frames, of the pieces of features whose activation ranges are averaged. So one loud moment
widens only the range of its own piece, instead of making the quantisation steps coarse for all clips."""
BODY = "/blocks."
"""The prefix of the names of the blocks' nodes, which are quantised. The head and log-softmax stay in float32."""
KINDS = ("Conv", "Relu", "Add", "Where")


class QuantisationError(ValueError):
    """There are no clips, or too little sound, to measure scales on."""


class Int8Clips(NamedTuple):
    """The features of the clips that int8 needs; see :func:`read_features`."""

    calibration: list[ClipFeatures]
    """The clips to measure the activations' ranges on: those that are not silent. wav2vec 2.0 needs none."""
    comparison: list[ClipFeatures]
    """The clips to compare the int8 graph with the network on. They differ from those of `calibration` if the manifest
    has more than :data:`MOST_CLIPS`."""


def read_features(manifest: Path, config: Config) -> Int8Clips:
    """Choose up to :data:`MOST_CLIPS` clips for each use, spread over a manifest, and compute their features.

    Raises:
        QuantisationError: The manifest has no clips, or those to calibrate on hold less than :data:`LEAST_S` of sound.
        RuntimeError: A clip cannot be read.
    """
    clips = read_manifest(manifest)
    if not clips:
        raise QuantisationError(f"a manifest to calibrate on must name at least one clip, but {manifest} has none")
    step = math.ceil(len(clips) / MOST_CLIPS)
    if isinstance(config.features, WaveformSettings):
        return Int8Clips([], load_features(clips[::step], config, manifest))
    # Of few clips, both uses have the same ones.
    read = {start: load_features(clips[start::step], config, manifest) for start in {0, step // 2}}
    features, others = read[0], read[step // 2]
    # Features are normalised: each band of a clip has variance 1, except bands of which nothing is heard.
    audible = [clip for clip in features if clip.std() > 0.5]
    heard = sum(clip.shape[-1] for clip in audible) * config.features.hop_samples / SAMPLE_RATE_HZ
    if heard < LEAST_S:
        raise QuantisationError(
            f"a manifest to calibrate on must hold at least {LEAST_S:g} s of sound, but {manifest} has {heard:.1f} s "
            "that are not silent"
        )
    return Int8Clips(audible, others)


def load_features(clips: Sequence[Clip], config: Config, manifest: Path) -> list[ClipFeatures]:
    """Compute the features of a manifest's clips: [num_mels, frames] float32 each, or [samples] for wav2vec 2.0.

    Raises:
        RuntimeError: Clips are bad; see :func:`carnelian_training.data.loading.load`.
    """
    batches = load([[Item(clip)] for clip in clips], config.features, config.data.num_threads, manifest=manifest)
    # Samples are one channel.
    return [batch.features[0, :, : int(batch.lengths[0])].squeeze(0).numpy() for batch in batches]


def quantise(network: CtcNetwork, clips: Sequence[ClipFeatures]) -> onnx.ModelProto:
    """Export the ragged graph with 8-bit weights, one scale per channel, and 8-bit activations.

    Activations have one scale per tensor; those of wav2vec 2.0, one per frame.

    Args:
        network: In evaluation mode.
        clips: The clips to measure the activations' ranges on; at least one, and not silent. wav2vec 2.0 needs none.
    """
    if isinstance(network, Wav2Vec2):
        graph = trace_waveforms(network)
        _unshare(graph.graph)
        quantise_products(graph)
        store_as_float16(graph.graph)
        return graph
    assert isinstance(network, StackNetwork)
    module = RaggedAcoustic(fold_batch_norms(network))
    graph = trace_ragged(module, (network.config.num_mels, 40))
    _unshare(graph.graph)
    body = [node.name for node in graph.graph.node if node.op_type in KINDS and node.name.startswith(BODY)]
    everything = np.concatenate(clips, axis=1)
    pieces = np.array_split(everything, max(1, everything.shape[1] // PIECE_FRAMES), axis=1)
    # Otherwise ONNX Runtime advises to pre-process the graph; what that would fold is folded already.
    mark = graph.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        quantize_static(
            graph,
            path,
            _Pieces(pieces),
            quant_format=QuantFormat.QDQ,
            nodes_to_quantize=body,
            per_channel=True,
            activation_type=QuantType.QUInt8,  # with signed weights, ONNX Runtime's fastest kernels on VNNI
            weight_type=QuantType.QInt8,
            reduce_range=True,  # see the module's docstring
            extra_options={"CalibMovingAverage": True},  # the mean of the pieces' ranges
        )
        quantised = onnx.load(path)
    quantised.metadata_props.remove(mark)
    _mask_integers(quantised.graph)
    return quantised


def _unshare(graph: onnx.GraphProto) -> None:
    """Give every layer its own weights: the exporter stores equal ones once, which the quantiser does not support."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Identity" and node.input[0] in stored]:
        copied = graph.initializer.add()
        copied.CopyFrom(stored[node.input[0]])
        copied.name = node.output[0]
        graph.node.remove(node)


def _mask_integers(graph: onnx.GraphProto) -> None:
    """Apply masks to a layer's integers (and their zero point), not to numbers that are then quantised once more.

    The resulting integers are the same: calibration runs on single clips, without gaps, so the numbers before and after
    a mask have the same range. ONNX Runtime's kernel for integers takes a third of the time of its kernel for quantised
    numbers. It also works in the layout of the convolutions; for the other one, tensors are transposed before and
    after.
    """
    makers = {output: node for node in graph.node for output in node.output}
    takers = {name: node for node in graph.node for name in node.input}
    for where in [node for node in graph.node if node.op_type == "Where" and node.name.startswith(BODY)]:
        dequantise, quantise = makers[where.input[1]], takers[where.output[0]]
        if dequantise.op_type != "DequantizeLinear":  # this mask is of the features
            continue
        integers, scale, zero = dequantise.input
        where.input[1:] = [integers, zero]
        where.output[0] = quantise.output[0]
        takers[quantise.output[0]].input[1:] = [scale, zero]
        graph.node.remove(quantise)
    taken = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for node in [node for node in graph.node if taken.isdisjoint(node.output)]:
        graph.node.remove(node)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in taken]:
        graph.initializer.remove(tensor)


class _Pieces(CalibrationDataReader):  # type: ignore[misc]
    """The reader through which ONNX Runtime's calibration gets the pieces of features, one by one."""

    def __init__(self, pieces: Sequence[ClipFeatures]) -> None:
        self._pieces: Iterator[ClipFeatures] = iter(pieces)

    def get_next(self) -> dict[str, npt.NDArray[np.generic]] | None:
        piece = next(self._pieces, None)
        if piece is None:
            return None
        inputs = make_inputs([piece], [piece.shape[1]])
        return {name: inputs[name] for name in INPUTS}
