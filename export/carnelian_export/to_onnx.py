"""A network as an ONNX graph that takes a ragged batch: clips of any lengths, one after the other, unpadded.

In: what Triton gives a model whose input allows ragged batches: all rows in one flat tensor, and their
shapes. The graph pads them to the longest row itself, masks by length, and answers as a padded batch.
"""

import copy
import io
import warnings

import numpy as np
import onnx
import torch
from carnelian_training.models.masked import MaskedConv, strided
from carnelian_training.models.quartznet import QuartzNet
from onnx import helper, numpy_helper
from torch import Tensor, nn

OPSET = 17  # the newest that ONNX Runtime 1.19 and TensorRT 10 both read in full
INPUTS = ("FEATURES", "FEATURES_SHAPE", "FEATURE_LENGTH")
OUTPUTS = ("LOG_PROBS", "LOG_PROB_LENGTH")
# Tensors inside the graph: `onnx.utils.extract_model` cuts the padded-batch model out at these names.
PADDED_FEATURES = "PADDED_FEATURES"  # [rows, num_mels, frames] float32
REAL_FRAMES = "REAL_FRAMES"  # [rows, 1] int32, frames of each row that hold the clip


class RaggedAcoustic(nn.Module):
    """A network with the tensors of the `<model>_acoustic` stage."""

    def __init__(self, network: QuartzNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, shapes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Score a ragged batch.

        Args:
            features: [total] float32; the rows' [num_mels, frames] tensors, flat, in order.
            shapes: [rows, 2] int32, (num_mels, frames) of each row.
            lengths: [rows, 1] int32, the clip's frames as its sender counts them, which may exceed `frames`.

        Returns:
            LOG_PROBS [rows, frames', labels] float32, zero after a row's own end; LOG_PROB_LENGTH [rows, 1]
            int32, from `lengths` alone; PADDED_FEATURES and REAL_FRAMES.
        """
        padded = unflatten(features, shapes)
        real_frames = torch.minimum(lengths, shapes[:, 1:])
        log_probs, ends = self.network(padded, real_frames[:, 0].long())
        # A zero frame is no distribution. It tells the decoder where a row ended whose length claims more.
        inside = torch.arange(log_probs.shape[1]) < ends[:, None]
        log_probs = torch.where(inside[:, :, None], log_probs, torch.zeros(()))
        log_prob_length = strided(lengths.clamp(min=0), self.network.config.stride)
        return log_probs, log_prob_length, padded, real_frames


def unflatten(features: Tensor, shapes: Tensor) -> Tensor:
    """Pad flat rows to the longest: [total] float32 and [rows, 2] -> [rows, num_mels, frames] float32.

    Padding is a zero that no row owns, so that NaN in one row stays there, and a batch of empty rows has
    something to read.
    """
    shapes = shapes.long()
    mels, frames = shapes[:, :1, None], shapes[:, 1:, None]  # [rows, 1, 1]
    sizes = mels * frames
    starts = sizes.cumsum(0) - sizes
    time = torch.arange(frames.max().clamp(min=1))  # type: ignore[call-overload]
    mel = torch.arange(mels.max())[:, None]  # type: ignore[call-overload]
    padding = features.shape[0]
    # [rows, num_mels, frames], where in `features` each value lies
    index = torch.where(time < frames, starts + mel * frames + time, padding)
    return torch.cat([features, features.new_zeros(1)])[index]


def export_onnx(network: QuartzNet) -> onnx.ModelProto:
    """Trace a network in evaluation mode into a graph with :data:`INPUTS` and :data:`OUTPUTS`."""
    module = RaggedAcoustic(_with_plain_convolutions(network)).eval()
    num_mels = network.config.num_mels
    frames = torch.tensor([40, 64])
    shapes = torch.stack([torch.full_like(frames, num_mels), frames], 1).int()
    features = torch.zeros(int(frames.sum()) * num_mels)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # The tracer is deprecated; its successor (torch 2.13) needs onnxscript and writes opset 18 first.
        warnings.simplefilter("ignore", DeprecationWarning)
        # PRESERVE: batch norms are left for the runtime to fold; folded here, the weights leave float16.
        torch.onnx.export(
            module,
            (features, shapes, shapes[:, 1:]),
            buffer,  # type: ignore[arg-type]
            input_names=list(INPUTS),
            output_names=[*OUTPUTS, PADDED_FEATURES, REAL_FRAMES],
            dynamic_axes={
                "FEATURES": {0: "total"},
                "FEATURES_SHAPE": {0: "rows"},
                "FEATURE_LENGTH": {0: "rows"},
                "LOG_PROBS": {0: "rows", 1: "frames"},
                "LOG_PROB_LENGTH": {0: "rows"},
            },
            opset_version=OPSET,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            dynamo=False,
        )
    graph = onnx.load_from_string(buffer.getvalue())
    del graph.graph.output[len(OUTPUTS) :]  # outputs only to get their names
    _store_as_float16(graph.graph)
    onnx.checker.check_model(graph, full_check=True)
    return graph


def _with_plain_convolutions(network: QuartzNet) -> QuartzNet:
    """A copy without the detour for PyTorch: ONNX Runtime runs dilated convolutions at full speed."""
    network = copy.deepcopy(network)
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MaskedConv):
                plain = nn.Conv2d(
                    child.in_channels,
                    child.out_channels,
                    child.kernel_size,  # type: ignore[arg-type]
                    child.stride,  # type: ignore[arg-type]
                    child.padding,  # type: ignore[arg-type]
                    child.dilation,  # type: ignore[arg-type]
                    child.groups,
                    child.bias is not None,
                )
                plain.load_state_dict(child.state_dict())
                setattr(parent, name, plain)
    return network


def _store_as_float16(graph: onnx.GraphProto) -> None:
    """Halve the file where that loses nothing, as for published checkpoints. Runtimes fold the casts."""
    casts = []
    for initializer in graph.initializer:
        if initializer.data_type != onnx.TensorProto.FLOAT or len(initializer.dims) != 4:
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
