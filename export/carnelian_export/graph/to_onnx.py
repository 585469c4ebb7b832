"""Export a network as an ONNX graph that takes a ragged batch: clips of any lengths, one after the other, unpadded.

The inputs are what Triton gives a model whose input allows ragged batches: all rows in one flat tensor, and their
shapes. The graph lays the clips out along one time axis, with gaps that keep them apart, so that a batch costs what its
clips cost, however different their lengths. The output is a padded batch.
"""

import copy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from carnelian_training.models.masked import Mask, MaskedConv, strided
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import PositionalConv, Wav2Vec2
from carnelian_training.replacement import written
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_export.graph.gaps import LOUDEST, Gaps, silence_once
from carnelian_export.graph.precision import lower
from carnelian_export.graph.time_axis import count, extend, find_spacing, line_up, moved_apart, pack, unpack

OPSET = 17  # the newest that ONNX Runtime 1.19 and TensorRT 10 both read in full
INPUTS = ("FEATURES", "FEATURES_SHAPE", "FEATURE_LENGTH")
OUTPUTS = ("LOG_PROBS", "LOG_PROB_LENGTH")


class RaggedAcoustic(nn.Module):
    """Jasper or QuartzNet with the input and output tensors of the `<model>_acoustic` stage.

    Args:
        network: In evaluation mode.
        mask: The class of masks that keep the clips apart.
        steps: The lengths, ascending, to which the time axis is extended; beyond the last one, to its multiples.
            Without any, the time axis is as long as the clips and their gaps.
    """

    def __init__(self, network: StackNetwork, mask: type[Mask] = Mask, steps: Sequence[int] = ()) -> None:
        super().__init__()
        self.network = network
        self.mask = mask
        self.steps = steps
        self.spacing = find_spacing(network)

    def forward(self, features: Tensor, shapes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score a ragged batch.

        Args:
            features: [total] float32; the rows' [num_mels, frames] tensors, flat, in order.
            shapes: [rows, 2] int32, (num_mels, frames) of each row.
            lengths: [rows, 1] int32, the clip's frames as its sender counts them, which may exceed `frames`.

        Returns:
            LOG_PROBS [rows, frames', labels] float32, zero after a row's own end, which shows if a length claims more
            than the row has, and NaN where features are not finite or beyond :data:`LOUDEST`; LOG_PROB_LENGTH
            [rows, 1] int32, from `lengths` alone.
        """
        config = self.network.config
        frames = shapes[:, 1].long()
        counted, real = count(lengths, frames)
        starts, starts_apart = (line_up(real, gap, config.body_stride) for gap in (self.spacing.near, self.spacing.far))
        sizes = frames * config.num_mels
        time, time_apart = ((at[-1] + real[-1]).clamp(min=1) for at in (starts, starts_apart))
        if self.steps:
            time = time_apart = extend(time_apart, self.steps)
        packed, valid = pack(features, sizes.cumsum(0) - sizes, frames, real, starts, time, config.num_mels)
        # Features that are not finite must not reach a convolution: they could pass a gap or, in int8, become numbers.
        usable = packed.abs() <= LOUDEST
        body = torch.where(usable, packed, torch.zeros(())).to(next(self.network.parameters()).dtype)
        with moved_apart(self.network, self.spacing, starts, starts_apart, real, time_apart, self.mask):
            log_probs = self.network.score(body[None], self.mask(valid[None, None, None]))[0]
        unusable = torch.where(usable, torch.zeros(()), torch.ones(())).sum(0)
        spoilt = F.max_pool1d(unusable[None, None], config.stride, ceil_mode=True)[0, 0]
        # The root of a negative number is NaN. NaN as a constant confuses ONNX Runtime's calibration for int8.
        spoilt = (-spoilt).sqrt()[:, None]
        longest, ends = strided(frames.max(), config.stride).clamp(min=1), strided(real, config.stride)
        unpacked = unpack(log_probs, longest, ends, starts_apart // config.stride)
        unpacked = unpacked + unpack(spoilt, longest, ends, starts // config.stride)
        return unpacked, strided(counted, config.stride).int()


class RaggedWaveforms(nn.Module):
    """wav2vec 2.0 with the input and output tensors of the `<model>_acoustic` stage.

    Clips are padded rows inside it: attention would mix clips that share one time axis.
    """

    def __init__(self, network: Wav2Vec2) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, shapes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score a ragged batch, as :class:`RaggedAcoustic` does.

        Args:
            features: [total] float32; the rows' samples, flat, in order.
            shapes: [rows, 1] int32, the samples of each row.
            lengths: [rows, 1] int32, the clip's samples as its sender counts them, which may exceed those of the row.
        """
        samples = shapes[:, 0].long()
        first = samples.cumsum(0) - samples
        return score_waveforms(self.network, features, first, samples, lengths, samples.max().clamp(min=1))


def score_waveforms(
    network: Wav2Vec2, features: Tensor, first: Tensor, samples: Tensor, lengths: Tensor, longest: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Score a ragged batch with wav2vec 2.0, as padded rows.

    Args:
        network: In evaluation mode.
        features: [total] float32; the rows' samples, flat, in order.
        first: [rows] int64, where each row starts in `features`.
        samples: [rows] int64, the samples of each row.
        lengths: [rows, 1] int32, the clip's samples as its sender counts them, which may exceed those of the row.
        longest: The length to pad the rows to, in samples.

    Returns:
        LOG_PROBS and LOG_PROB_LENGTH, as :class:`RaggedAcoustic` returns them.
    """
    counted, real = count(lengths, samples)
    time = torch.arange(longest)  # type: ignore[arg-type]
    index = torch.where(time < real[:, None], first[:, None] + time, features.shape[0])
    waveforms = torch.cat([features, features.new_zeros(1)])[index]  # positions past a clip's end read the zero
    log_probs, ends = network(waveforms[:, None].to(network.head.weight.dtype), real)
    inside = torch.arange(log_probs.shape[1]) < ends[:, None]
    return torch.where(inside[:, :, None], log_probs, torch.zeros(())), network.output_lengths(counted).int()


class PlainPositions(nn.Module):
    """The positional convolution of wav2vec 2.0 with a plain weight, without weight normalisation."""

    def __init__(self, positions: PositionalConv) -> None:
        super().__init__()
        self.positions = positions
        self.weight = nn.Parameter(positions.weight().detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return the positional embedding of `x` [batch, frames, width], of the same shape."""
        return self.positions.convolve(x.to(self.weight.dtype), self.weight).to(x.dtype)


def export_ragged(network: CtcNetwork, dtype: torch.dtype = torch.float32) -> onnx.ModelProto:
    """Export the graph of the `<model>_acoustic` stage, with :data:`INPUTS` and :data:`OUTPUTS`.

    Args:
        network: In evaluation mode.
        dtype: The type that the network computes in; features and log-probabilities are float32 in any case.
    """
    if dtype != torch.float32:
        network = lower(network, dtype)
    if isinstance(network, StackNetwork):
        module = RaggedAcoustic(silence_once(network), Gaps) if dtype == torch.float32 else RaggedAcoustic(network)
        graph = trace_ragged(module, (network.config.num_mels, 40))
    else:
        assert isinstance(network, Wav2Vec2)
        graph = trace_waveforms(network)
    store_as_float16(graph.graph)
    return graph


def trace_ragged(module: nn.Module, shape: tuple[int, ...]) -> onnx.ModelProto:
    """Trace the graph of a module with :data:`INPUTS`, on a row of this shape and a longer row."""
    shapes = torch.tensor([shape, (*shape[:-1], shape[-1] * 8 // 5)], dtype=torch.int32)
    features = torch.zeros(int(shapes.prod(1).sum()))
    return trace(module, dict(zip(INPUTS, (features, shapes, shapes[:, -1:]), strict=True)))


def trace_waveforms(network: Wav2Vec2) -> onnx.ModelProto:
    """Trace the graph of wav2vec 2.0 with :data:`INPUTS`."""
    return trace_ragged(RaggedWaveforms(network), (40 * network.config.stride,))


def trace(module: nn.Module, inputs: dict[str, Tensor]) -> onnx.ModelProto:
    """Trace the graph of a module that returns :data:`OUTPUTS`; rows and frames of every tensor may vary."""
    module = _with_plain_convolutions(module).eval()
    with torch.inference_mode():
        num_labels = module(*inputs.values())[0].shape[-1]
    rows_and_frames = {0: "rows", 2: "frames"} if inputs["FEATURES"].ndim == 3 else {0: "total"}
    # wav2vec 2.0: fold what is computed from weights alone. Runtimes want constants as the weights of convolutions.
    folds = any(isinstance(part, Wav2Vec2) for part in module.modules())
    # In a folder, for the exporter puts weights of over 2 GiB beside the graph.
    with tempfile.TemporaryDirectory() as scratch, written(Path(scratch)), warnings.catch_warnings():
        path = str(Path(scratch) / "model.onnx")
        # The tracer is deprecated; its successor (torch 2.13) needs onnxscript and writes opset 18 first.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "Constant folding - Only steps=1")  # it is a padding, which the runtime folds
        # PRESERVE leaves batch norms for the runtime to fold: folded here, weights would no longer fit float16.
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=list(OUTPUTS),
            dynamic_axes={
                **{name: {0: "rows" if value.ndim > 1 else f"{name}_size"} for name, value in inputs.items()},
                "LOG_PROB_LENGTH": {0: "rows"},
                "FEATURES": rows_and_frames,
                "LOG_PROBS": {0: "rows", 1: "output_frames"},
            },
            opset_version=OPSET,
            training=torch.onnx.TrainingMode.EVAL if folds else torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=folds,
            dynamo=False,
        )
        # Opset 17 lacks operators in bfloat16 that TensorRT has, so the checker would refuse such a graph.
        if all(weights.dtype != torch.bfloat16 for weights in module.parameters()):
            onnx.checker.check_model(path, full_check=True)
        model = onnx.load(path)
    # The exporter gives this dimension a name. Triton's ONNX Runtime backend loads no model whose output differs in any
    # dimension from the configuration, where it is the number of labels.
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = num_labels
    return model


def _with_plain_convolutions(network: nn.Module) -> nn.Module:
    """Return a copy that shares the weights, with plain convolutions in place of `MaskedConv` and of weight norm."""
    network = copy.deepcopy(network, {id(weights): weights for weights in network.parameters()})
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PositionalConv):
                setattr(parent, name, PlainPositions(child))
            if isinstance(child, MaskedConv):
                child.__class__ = nn.Conv2d  # type: ignore[assignment]
    return network


def store_as_float16(graph: onnx.GraphProto) -> None:
    """Halve the file: store weights in float16 where that loses nothing, as for published checkpoints.

    The graph is changed in place. Runtimes fold the casts that are added to it.
    """
    casts = []
    for initializer in graph.initializer:
        if initializer.data_type != onnx.TensorProto.FLOAT or len(initializer.dims) < 2:
            continue
        values = numpy_helper.to_array(initializer)
        with np.errstate(over="ignore"):
            halved = values.astype(np.float16)
        if np.array_equal(halved.astype(np.float32), values):
            name = initializer.name
            initializer.CopyFrom(numpy_helper.from_array(halved, f"{name}.float16"))
            casts.append(
                helper.make_node("Cast", [initializer.name], [name], f"{name}.cast", to=onnx.TensorProto.FLOAT)
            )
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
