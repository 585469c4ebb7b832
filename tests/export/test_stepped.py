import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from carnelian_export.graph.stepped import export_stepped
from carnelian_export.graph.time_axis import find_spacing
from carnelian_export.model_configs import TensorSizes, batches_of_steps, read_config
from carnelian_export.parity import check_parity, run, score
from carnelian_export.profiles import STEPS
from carnelian_export.repository import write_model
from carnelian_export.target import Target
from carnelian_serving.backends.onnxruntime import providers
from carnelian_training.checkpoint import build_model
from carnelian_training.run_config import load_config

ROOT = Path(__file__).parents[2]
SMALL_STEPS = (64, 256, 400)
# Positions in `clips`, of 1, 37, 200 and 90 frames. In the order of the steps that they need; the last two exceed them.
BATCHES = ([0], [1], [0, 1], [3], [1, 3], [2], [3, 2], [0, 1, 2, 3], [2, 2], [2, 2, 3, 2, 2])
TOLERANCE = 1e-4  # kernels add the same float32 numbers in another order


@pytest.fixture(params=["network", "jasper", "two heads"])
def stacked(request, config):
    if request.param == "two heads":
        return build_model(dataclasses.replace(config, model=dataclasses.replace(config.model, head_frames=2))).eval()
    return request.getfixturevalue(request.param)


def open_profiled(network, folder: Path) -> onnxruntime.InferenceSession:
    onnx.save(export_stepped(network, torch.float32, SMALL_STEPS), folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), options)


def shapes_of_convolutions(session: onnxruntime.InferenceSession) -> dict[str, set[str]]:
    """The shapes of what each convolution has read, by its name."""
    shapes = defaultdict(set)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("args", {}).get("op_name") in ("Conv", "FusedConv"):
            shapes[event["name"]].add(str(event["args"]["input_type_shape"][0]))
    return shapes


def test_a_batch_in_any_branch_equals_each_clip_alone_in_pytorch(stacked, clips, tmp_path):
    session = open_profiled(stacked, tmp_path)
    for rows in BATCHES:
        batch, lengths = run(session, [clips[row] for row in rows], [clips[row].shape[1] for row in rows])
        for log_probs, length, row in zip(batch, lengths[:, 0], rows, strict=True):
            expected, end = score(stacked, clips[row], clips[row].shape[1])
            assert length == end
            np.testing.assert_allclose(log_probs[:end], expected, atol=TOLERANCE)
            assert not log_probs[end:].any()


def test_below_the_last_step_every_convolution_sees_one_shape(stacked, clips, tmp_path):
    session = open_profiled(stacked, tmp_path)
    for rows in (*BATCHES, *BATCHES[::-1]):
        run(session, [clips[row] for row in rows], [clips[row].shape[1] for row in rows])
    shapes = shapes_of_convolutions(session)
    for step in SMALL_STEPS:
        of_step = {len(seen) for name, seen in shapes.items() if name.startswith(f"step{step}.")}
        assert of_step == ({1} if step != SMALL_STEPS[-1] else {3})  # 400, 800 and 1200 frames


def test_branches_share_the_weights(stacked, tmp_path):
    onnx.save(export_stepped(stacked, torch.float32), tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options)
    for name in ("model.onnx", "optimised.onnx"):
        whole, *branches = graphs(onnx.load(tmp_path / name).graph)
        sizes = [sum(len(weights.raw_data) for weights in graph.initializer) for graph in (whole, *branches)]
        assert len(branches) == 2 * len(STEPS) - 2
        assert sum(sizes[1:]) < 0.01 * sizes[0]


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """A graph, and all those of its branches and theirs."""
    inner = [attribute.g for node in graph.node if node.op_type == "If" for attribute in node.attribute]
    return [graph, *(found for branch in inner for found in graphs(branch))]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_export_for_cuda_has_steps_and_the_server_knows_them(tmp_path, config, network, precision):
    write_model(tmp_path, "tiny", config, network, target=Target(precision=precision, provider="cuda"))
    path = tmp_path / "tiny_acoustic/1/model.onnx"
    session = onnxruntime.InferenceSession(str(path))
    assert session.get_modelmeta().custom_metadata_map == {providers.STEPS_KEY: "2048,8192,32768,65536"}
    check_parity(path, network, precision)


def test_a_step_that_only_the_largest_batch_needs_is_warmed_up():
    sizes = TensorSizes(features=(64, -1), hop_samples=320, max_batch_size=32, vocabulary=29)
    assert batches_of_steps(sizes) == [(2, 1), (20, 3), (20, 9), (20, 32)]  # 32,000 frames, and 31 gaps


@pytest.mark.parametrize("name", ["quartznet_15x5", "quartznet_demo", "jasper_10x5dr"])
def test_the_server_warms_every_step_up(tmp_path, name, config, network):
    write_model(tmp_path, "tiny", config, network, target=Target(provider="cuda"))
    warm_ups = read_config(tmp_path / "tiny_acoustic/config.pbtxt").model_warmup
    with torch.device("meta"):
        far = find_spacing(build_model(load_config(ROOT / f"training/configs/{name}.yaml"))).far
    steps = []
    for warm_up in warm_ups:
        (frames,) = np.fromfile(
            tmp_path / "tiny_acoustic/warmup" / warm_up.inputs["FEATURE_LENGTH"].input_data_file, "<i4"
        )
        assert list(warm_up.inputs["FEATURES"].dims) == [64, frames]
        time = warm_up.batch_size * frames + (warm_up.batch_size - 1) * far
        steps.append(min(step for step in STEPS if step >= time))
    assert steps == list(STEPS)
