"""Quantise wav2vec 2.0 to int8 for CPUs: its products with weights are of integers, with a scale for each frame.

A frame's scale is its largest magnitude. So it depends on no other frame and no other clip, and is not measured
beforehand. Transformers have a few activations that are far larger than all others: a constant scale would have to hold
them, and leave few steps for the rest.
"""

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

DOMAIN = "com.microsoft"
"""Of ONNX Runtime's own operators; ONNX has the product of integers alone, whose result would be written twice more."""
HEAD = "/network/head/"
"""The prefix of the names of the head's nodes, which stay in float32."""
LARGEST_WEIGHT = 63
"""7 of 8 bits, for the reason that :mod:`carnelian_export.graph.quantise` gives."""
STEP, ZERO, LEAST = "frame_step", "frame_zero", "frame_least"
LEAST_SCALE = np.float32(1e-30)
CONSTANTS = {STEP: np.float32(1 / 127), ZERO: np.uint8(128), LEAST: LEAST_SCALE}
"""The step and the zero of frames that were divided by their scales, and the least scale, for frames of zeros."""


def quantise_products(model: onnx.ModelProto) -> None:
    """Compute products with constant weights in integers: 8-bit weights, one scale per output, 8-bit activations.

    The graph is changed in place. Convolutions, attention, norms and the head stay in float32. No weight may be shared.
    """
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2}
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in CONSTANTS.items())
    nodes: list[onnx.NodeProto] = []
    frames: dict[str, tuple[str, str]] = {}
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights or node.name.startswith(HEAD):
            nodes.append(node)
            continue
        source, weight = node.input
        if source not in frames:  # which query, key and value share
            frames[source] = f"{node.name}/frames", f"{node.name}/scales"
            nodes += _quantise_frames(source, *frames[source])
        integers, scales = frames[source]
        steps, product = f"{weight}/steps", f"{node.name}/product"
        graph.initializer.append(numpy_helper.from_array(_quantise_weight(weights[weight]), steps))
        nodes += [
            helper.make_node(
                "MatMulIntegerToFloat",
                [integers, weight, STEP, steps, ZERO],
                [product],
                product,
                domain=DOMAIN,
            ),
            helper.make_node("Mul", [product, scales], node.output, f"{node.name}/scaled"),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _quantise_frames(source: str, integers: str, scales: str) -> list[onnx.NodeProto]:
    """Make the nodes that divide the frames of `source` by their scales, and round them to uint8."""
    high, low, negated, inverse, unit = (f"{integers}/{part}" for part in ("high", "low", "negated", "inverse", "unit"))
    return [
        helper.make_node("ReduceMax", [source], [high], high, axes=[-1]),
        helper.make_node("ReduceMin", [source], [low], low, axes=[-1]),
        helper.make_node("Neg", [low], [negated], negated),
        helper.make_node("Max", [high, negated, LEAST], [scales], scales),
        helper.make_node("Reciprocal", [scales], [inverse], inverse),
        helper.make_node("Mul", [source, inverse], [unit], unit),
        helper.make_node("QuantizeLinear", [unit, STEP, ZERO], [integers], integers),
    ]


def _quantise_weight(weight: onnx.TensorProto) -> npt.NDArray[np.float32]:
    """Round a weight [inputs, outputs] to int8 in place, and return its steps [outputs]."""
    values, name = numpy_helper.to_array(weight), weight.name
    steps: npt.NDArray[np.float32] = np.maximum(np.abs(values).max(0) / LARGEST_WEIGHT, LEAST_SCALE)
    weight.CopyFrom(numpy_helper.from_array(np.rint(values / steps).astype(np.int8), name))
    return steps
