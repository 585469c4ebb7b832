"""The acoustic graphs that the candidates are measured with.

In: the shipped graph, or the same network for batches that are padded before it. Out: the latter behind a part that
pads ragged batches, and any of them with one more output, the number of frames that it processed.
"""

import onnx
import torch
from carnelian_export.graph.to_onnx import store_as_float16, trace
from carnelian_training.config import Config
from carnelian_training.models.network import CtcNetwork, StackNetwork
from onnx import TensorProto, compose, helper, parser
from torch import Tensor, nn

from carnelian_perf.clips import HOP_SAMPLES
from carnelian_perf.traffic.loops import PROCESSED_FRAMES

# Rows of any lengths, flat and in order -> [rows, num_mels, frames], zero after each row's end.
_UNFLATTEN = """
<ir_version: 8, opset_import: ["" : 17]>
unflatten (float[total] FEATURES, int32[rows, 2] FEATURES_SHAPE) => (float[rows, num_mels, frames] PADDED) {
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    last_axis = Constant <value_ints: ints = [2]> ()
    second_axis = Constant <value_ints: ints = [1]> ()
    nothing = Constant <value_floats: floats = [0.0]> ()
    shapes = Cast <to: int = 7> (FEATURES_SHAPE)
    row_mels, row_frames = Split <axis: int = 1> (shapes)
    sizes = Mul (row_mels, row_frames)
    ends = CumSum (sizes, zero)
    row_starts = Sub (ends, sizes)
    longest = ReduceMax <keepdims: int = 0> (row_frames)
    num_mels = ReduceMax <keepdims: int = 0> (row_mels)
    time = Range (zero, longest, one)
    mels = Range (zero, num_mels, one)
    mel = Unsqueeze (mels, second_axis)
    frames = Unsqueeze (row_frames, last_axis)
    starts = Unsqueeze (row_starts, last_axis)
    mel_offsets = Mul (mel, frames)
    mel_starts = Add (starts, mel_offsets)
    index = Add (mel_starts, time)
    inside = Less (time, frames)
    end = Size (FEATURES)
    position = Where (inside, index, end)
    with_zero = Concat <axis: int = 0> (FEATURES, nothing)
    PADDED = Gather (with_zero, position)
}
"""


class _Padded(nn.Module):
    """A network for batches that are padded already."""

    def __init__(self, network: StackNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score `features` [rows, num_mels, frames] float32 of `lengths` [rows, 1] int32.

        Returns:
            LOG_PROBS [rows, frames', labels] float32 and LOG_PROB_LENGTH [rows, 1] int32.
        """
        log_probs, log_prob_lengths = self.network(features, lengths[:, 0].long())
        return log_probs, log_prob_lengths[:, None].int()


def build_padded(config: Config, network: CtcNetwork) -> onnx.ModelProto:
    """Export the network for batches that are padded before it.

    Returns:
        The graph with the inputs FEATURES [rows, num_mels, frames] and FEATURE_LENGTH [rows, 1], and the outputs of
        the `<model>_acoustic` stage.

    Raises:
        ValueError: The network has no features of 10 ms, in which clips and padding are counted.
    """
    if not isinstance(network, StackNetwork) or config.features.hop_samples != HOP_SAMPLES:
        raise ValueError(
            f"the model must be a Jasper or QuartzNet with features every {HOP_SAMPLES} samples, in which clips and "
            f"padding are counted, but is a {config.model.name} with {config.features.hop_samples}"
        )
    features = torch.zeros(2, network.config.num_mels, 64)
    lengths = torch.tensor([[40], [64]], dtype=torch.int32)
    graph = trace(_Padded(network), {"FEATURES": features, "FEATURE_LENGTH": lengths})
    store_as_float16(graph.graph)
    return graph


def pad_inside(padded: onnx.ModelProto) -> onnx.ModelProto:
    """Put a part that pads ragged batches before a graph for padded batches.

    Args:
        padded: FEATURES [rows, num_mels, frames], FEATURE_LENGTH [rows, 1] -> LOG_PROBS, LOG_PROB_LENGTH.

    Returns:
        The graph with the inputs FEATURES [total], flat, FEATURES_SHAPE int32 [rows, 2] and FEATURE_LENGTH.
    """
    door = parser.parse_model(_UNFLATTEN)
    door = compose.add_prefix(door, "door/", rename_inputs=False, rename_outputs=False)
    door.ir_version = padded.ir_version
    return compose.merge_models(door, padded, io_map=[("PADDED", "FEATURES")])


def count_frames(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add the output :data:`PROCESSED_FRAMES` to an acoustic graph.

    Raises:
        ValueError: there is no convolution to count at.
    """
    convolution = next((node for node in model.graph.node if node.op_type == "Conv"), None)
    if convolution is None:
        raise ValueError("frames are counted at the graph's first convolution, but it has none")
    counted = onnx.ModelProto()
    counted.CopyFrom(model)

    def name(part: str) -> str:
        return f"{PROCESSED_FRAMES}/{part}"

    constants = {
        name("ends"): helper.make_tensor(name("ends"), TensorProto.INT64, [2], [0, -1]),
        name("one"): helper.make_tensor(name("one"), TensorProto.INT64, [1], [1]),
    }
    counted.graph.initializer.extend(constants.values())
    counted.graph.node.extend(
        [
            # [batch, mels, 1, time] -> batch * time
            helper.make_node("Shape", [convolution.input[0]], [name("shape")]),
            helper.make_node("Gather", [name("shape"), name("ends")], [name("sizes")]),
            helper.make_node("ReduceProd", [name("sizes")], [name("frames")], keepdims=1),
            helper.make_node("Cast", [name("frames")], [name("total")], to=TensorProto.FLOAT),
            helper.make_node("Shape", ["FEATURE_LENGTH"], [name("rows")], end=1),
            helper.make_node("Cast", [name("rows")], [name("num_rows")], to=TensorProto.FLOAT),
            helper.make_node("Div", [name("total"), name("num_rows")], [name("share")]),
            helper.make_node("Concat", [name("rows"), name("one")], [name("form")], axis=0),
            helper.make_node("Expand", [name("share"), name("form")], [PROCESSED_FRAMES]),
        ]
    )
    counted.graph.output.append(helper.make_tensor_value_info(PROCESSED_FRAMES, TensorProto.FLOAT, ["rows", 1]))
    onnx.checker.check_model(counted)
    return counted
