"""The ragged graph for ONNX Runtime's CUDA provider, in which hardly a convolution sees a second shape.

Since version 1.20, that provider prepares a convolution anew whenever its input has another shape than the time before
(microsoft/onnxruntime#23006), which can take many times as long as to run it. So the time axis has one of a few lengths
here, and the graph holds the network once for each of them, in branches that share the weights.
"""

import copy
from collections.abc import Collection, Sequence

import numpy as np
import onnx
import torch
from carnelian_training.models.network import StackNetwork
from onnx import helper, numpy_helper

from carnelian_export.graph.precision import lower
from carnelian_export.graph.to_onnx import RaggedAcoustic, store_as_float16, trace_ragged
from carnelian_export.profiles import STEPS

STEPS_KEY = "time_axis_frames"
"""The key of the steps in the file's metadata; servers tell by it that shapes are few."""

LAYERS = ("Conv", "Slice")
"""The operators that make a node one of the network's layers; a mask after a stride is a slice."""
TIME_AXIS = "time_axis"
"""The name of the tensor that holds the length of the time axis, [1] int64."""


def export_stepped(network: StackNetwork, dtype: torch.dtype, steps: Sequence[int] = STEPS) -> onnx.ModelProto:
    """Export the graph of the `<model>_acoustic` stage for ONNX Runtime's CUDA provider.

    Args:
        network: In evaluation mode.
        dtype: The type that the network computes in.
        steps: The lengths of the time axis, at least two, ascending, each a multiple of the network's stride.
    """
    lowered = lower(network, dtype)  # with batch norms folded: the runtime would give each branch weights of its own
    assert isinstance(lowered, StackNetwork)
    model = trace_ragged(RaggedAcoustic(lowered, steps=steps), (network.config.num_mels, 40))
    store_as_float16(model.graph)
    _branch(model.graph, steps)
    helper.set_model_props(model, {STEPS_KEY: ",".join(map(str, steps))})
    return model


def _branch(graph: onnx.GraphProto, steps: Sequence[int]) -> None:
    """Repeat the network's layers, and what depends on them, in a branch for each step; `graph` is changed in place."""
    body: list[onnx.NodeProto] = []
    made: set[str] = set()
    for node in graph.node:  # in an order in which inputs come first
        if node.op_type in LAYERS or made.intersection(node.input):
            body.append(node)
            made.update(node.output)
    others = [node for node in graph.node if not made.intersection(node.output)]
    (output,) = (tensor for tensor in graph.output if tensor.name in made)
    first = next(node for node in body if node.op_type == "Conv")
    others.append(helper.make_node("Shape", [first.input[0]], [TIME_AXIS], start=-1))
    nodes = _copy(body, made, f"step{steps[-1]}.")
    for step in reversed(steps[:-1]):
        graph.initializer.append(numpy_helper.from_array(np.array([step]), f"step{step}"))
        others.append(helper.make_node("LessOrEqual", [TIME_AXIS, f"step{step}"], [f"{TIME_AXIS}<={step}"]))
        fits, exceeds = (
            helper.make_graph(branch, f"{comparison}{step}", [], [_renamed(output, branch[-1].output[0])])
            for comparison, branch in (("at most ", _copy(body, made, f"step{step}.")), ("over ", nodes))
        )
        result = output.name if step == steps[0] else f"{output.name}>{step}"
        nodes = [helper.make_node("If", [f"{TIME_AXIS}<={step}"], [result], then_branch=fits, else_branch=exceeds)]
    del graph.node[:]
    graph.node.extend([*others, *nodes])


def _copy(nodes: Sequence[onnx.NodeProto], names: Collection[str], prefix: str) -> list[onnx.NodeProto]:
    """Copy nodes, with `prefix` before their names and before those of the tensors in `names`."""
    copies = []
    for node in nodes:
        copied = copy.deepcopy(node)
        copied.name = prefix + node.name
        for tensors in (copied.input, copied.output):
            tensors[:] = [prefix + name if name in names else name for name in tensors]
        copies.append(copied)
    return copies


def _renamed(tensor: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    renamed = copy.deepcopy(tensor)
    renamed.name = name
    return renamed
