import copy
import dataclasses
import os
import platform
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from carnelian_export.graph import gaps
from carnelian_export.graph.folding import fold_batch_norms
from carnelian_export.graph.gaps import LOUDEST
from carnelian_export.graph.shaped import export_shaped
from carnelian_export.graph.stepped import export_stepped
from carnelian_export.graph.time_axis import Spacing, find_spacing, line_up
from carnelian_export.graph.to_onnx import INPUTS, OPSET, OUTPUTS, export_ragged
from carnelian_export.parity import ParityError, check_parity, run, score
from carnelian_training.checkpoint import build_model, load_model
from carnelian_training.models.blocks import StageConfig
from carnelian_training.models.masked import MaskedBatchNorm
from carnelian_training.models.network import CtcNetwork
from carnelian_training.run_config import load_config
from onnxruntime import GraphOptimizationLevel as Level

# Kernels add the same float32 numbers in another order.
TOLERANCE = 1e-4
SEEN = ("Conv", "LogSoftmax")


@pytest.fixture
def session(network, open_session):
    return open_session(export_ragged(network))


@pytest.fixture
def optimise(tmp_path):
    """The graph that ONNX Runtime makes of another."""

    def optimise(model, level=Level.ORT_ENABLE_EXTENDED):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        return onnx.load(options.optimized_model_filepath).graph

    return optimise


def test_the_graph_suits_onnxruntime_1_19(network):
    model = export_ragged(network)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", OPSET)]
    assert model.ir_version <= 10
    assert [tensor.name for tensor in model.graph.input] == list(INPUTS)
    assert [tensor.name for tensor in model.graph.output] == list(OUTPUTS)


@pytest.mark.parametrize("form", [export_ragged, lambda network: export_shaped(network, torch.float32, 160)])
def test_outputs_declare_the_dimensions_of_the_configuration(form, network, config, open_session):
    # Triton's ONNX Runtime backend compares them all, and -1 is not 29.
    outputs = open_session(form(network)).get_outputs()
    log_probs, lengths = ([size if isinstance(size, int) else -1 for size in tensor.shape] for tensor in outputs)
    assert log_probs == [-1, -1, len(config.labels) + 1]
    assert lengths == [-1, 1]


@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_the_runtime_folds_every_batch_norm(fixture, request, optimise):
    model = export_ragged(request.getfixturevalue(fixture))
    assert "BatchNormalization" in {node.op_type for node in model.graph.node}
    assert "BatchNormalization" not in {node.op_type for node in optimise(model).node}


@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_a_ragged_batch_equals_each_clip_alone_in_pytorch(fixture, request, clips, frames, open_session):
    network = request.getfixturevalue(fixture)
    session = open_session(export_ragged(network))
    batch, lengths = run(session, clips, frames)
    assert lengths.tolist() == [[1], [19], [100], [45]]
    for row, clip in enumerate(clips):
        expected, end = score(network, clip, clip.shape[1])
        np.testing.assert_allclose(batch[row, :end], expected, atol=TOLERANCE)
        np.testing.assert_allclose(run(session, [clip], [clip.shape[1]])[0][0], expected, atol=TOLERANCE)
        assert not batch[row, end:].any()


def test_a_head_of_two_frames_keeps_clips_apart(config, clips, frames, open_session):
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, head_frames=2))
    network = build_model(config).eval()
    batch, lengths = run(open_session(export_ragged(network)), clips, frames)
    assert lengths[:, 0].tolist() == frames
    for row, clip in enumerate(clips):
        expected, end = score(network, clip, clip.shape[1])
        assert end == clip.shape[1]
        np.testing.assert_allclose(batch[row, :end], expected, atol=TOLERANCE)


def test_a_clip_that_ends_before_its_tensor_equals_the_cut_clip(session, clips):
    clips[2][:, 120:] = np.nan
    found, lengths = run(session, clips, [1, 37, 120, 90])
    expected, _ = run(session, [clips[2][:, :120].copy()], [120])
    assert lengths[2, 0] == 60
    np.testing.assert_allclose(found[2, :60], expected[0], atol=TOLERANCE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", [export_ragged, lambda network: export_stepped(network, torch.float32)])
def test_a_bad_value_stays_in_its_row(form, network, clips, frames, value, open_session):
    session = open_session(form(network))
    before, _ = run(session, clips, frames)
    clips[1][:] = value
    after, _ = run(session, clips, frames)
    assert np.isnan(after[1]).any()
    for row in (0, 2, 3):
        np.testing.assert_array_equal(after[row], before[row])


@pytest.mark.parametrize("value", [np.nan, -np.inf, 2 * LOUDEST])
@pytest.mark.parametrize(("head_frames", "spoilt"), [(1, 50), (2, 101)])
def test_a_single_bad_value_shows(config, clips, frames, open_session, head_frames, spoilt, value):
    model = dataclasses.replace(config.model, head_frames=head_frames)
    session = open_session(export_ragged(build_model(dataclasses.replace(config, model=model)).eval()))
    before, _ = run(session, clips, frames)
    clips[2][3, 101] = value
    after, _ = run(session, clips, frames)
    assert np.isnan(after[2]).all(1).nonzero()[0].tolist() == [spoilt]
    np.testing.assert_array_equal(after[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_the_loudest_clip_is_not_heard_next_to_it(fixture, clips, frames, request, open_session):
    session = open_session(export_ragged(amplified(request.getfixturevalue(fixture))))
    before, _ = run(session, clips, frames)
    clips[1] = LOUDEST * np.sign(clips[1])
    after, _ = run(session, clips, frames)
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_a_network_that_could_be_heard_next_to_it_is_refused(network, tmp_path, monkeypatch):
    monkeypatch.setattr(gaps, "SILENCE", -1e4)
    onnx.save(export_ragged(amplified(network)), tmp_path / "model.onnx")
    with pytest.raises(ParityError, match="beside a very loud one"):
        check_parity(tmp_path / "model.onnx", amplified(network))


def amplified(network: CtcNetwork) -> CtcNetwork:
    """With activations that are ten times as large after each layer."""
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, MaskedBatchNorm):
            torch.nn.init.constant_(module.weight, 10)
    return network


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONNX Runtime has blocked convolutions for x86-64")
@pytest.mark.skipif(onnxruntime.__version__.startswith("1.23."), reason="the last for Python 3.10 fuses fewer ReLUs")
@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_the_runtime_masks_within_the_convolutions(fixture, request, optimise):
    network = request.getfixturevalue(fixture)
    kinds = Counter(node.op_type for node in optimise(export_ragged(network), Level.ORT_ENABLE_ALL).node)
    # At both ends, and where clips are moved apart.
    assert find_spacing(network).block is not None
    assert (kinds["ReorderInput"], kinds["ReorderOutput"]) == (2, 2)
    # A dilated convolution hides from the runtime that the shapes after it are equal.
    stages = network.config.stages
    dilated = [stage.dilation > 1 for stage in stages].index(True)
    assert kinds["Relu"] == len(stages) - dilated


def test_lengths_are_told_as_they_came_in(session, clips):
    _, lengths = run(session, clips, [0, -(2**31), 1_000_001, 2**31 - 1])
    assert lengths[:, 0].tolist() == [0, 0, 500_001, 2**30]


def test_a_length_that_lies_shows_as_zero_frames_in_any_batch(session, clips):
    batch, _ = run(session, clips, [1, 50, 200, 90])
    assert batch[1, 18].any()
    assert not batch[1, 19:].any()


def test_rows_without_frames_pass(session):
    log_probs, lengths = run(session, [np.zeros((64, 0), np.float32)] * 2, [0, 0])
    assert log_probs.shape[0] == 2
    assert not lengths.any()


def test_published_weights_are_stored_as_float16_and_exact(checkpoint, optimise):
    _, network = load_model(checkpoint)
    model = export_ragged(network)
    weights = [t for t in model.graph.initializer if len(t.dims) == 4]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.FLOAT16}
    folded = optimise(model)
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in folded.initializer}
    assert "BatchNormalization" not in {node.op_type for node in folded.node}


def test_weights_that_float16_would_change_stay_float32(network):
    weights = [t for t in export_ragged(network).graph.initializer if len(t.dims) == 4]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("fixture", ["network", "jasper"])
def test_folded_batch_norms_change_nothing(fixture, clips, request):
    network = request.getfixturevalue(fixture)
    folded = fold_batch_norms(network)
    assert not [module for module in folded.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for clip in clips:
        expected, _ = score(network, clip, clip.shape[1])
        np.testing.assert_allclose(score(folded, clip, clip.shape[1])[0], expected, atol=TOLERANCE)


def test_convolutions_compute_in_float16_and_log_softmax_in_float32(network):
    inferred = onnx.shape_inference.infer_shapes(export_ragged(network, torch.float16), strict_mode=True).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    by_kind = {kind: {kinds[node.output[0]] for node in inferred.node if node.op_type == kind} for kind in SEEN}
    assert by_kind == {"Conv": {onnx.TensorProto.FLOAT16}, "LogSoftmax": {onnx.TensorProto.FLOAT}}


def test_rows_of_float16_keep_apart(network, clips, frames, open_session):
    session = open_session(export_ragged(network, torch.float16))
    batch, _ = run(session, clips, frames)
    for row, clip in enumerate(clips):
        alone, lengths = run(session, [clip], [clip.shape[1]])
        np.testing.assert_allclose(batch[row, : lengths[0, 0]], alone[0], atol=2e-3)  # float16's steps
    clips[1][:] = np.nan
    after, _ = run(session, clips, frames)
    assert np.isnan(after[1]).any()
    for row in (0, 2, 3):
        np.testing.assert_array_equal(after[row], batch[row])


def test_clips_start_at_multiples_of_the_stride_and_keep_the_gap():
    lengths = torch.tensor([1, 37, 0, 200, 90])
    starts = line_up(lengths, 7, 4)
    assert starts.tolist() == [0, 8, 52, 60, 268]
    assert ((starts[1:] - (starts + lengths)[:-1]) >= 7).all()


@pytest.mark.parametrize(
    ("name", "spacing"),
    [
        ("quartznet_15x5", Spacing(74, 172, 16)),
        ("quartznet_demo", Spacing(36, 36, None)),
        ("jasper_10x5dr", Spacing(24, 56, 11)),
    ],
)
def test_clips_are_moved_apart_where_that_saves_most(name, spacing):
    config = load_config(Path(__file__).parents[2] / f"training/configs/{name}.yaml")
    with torch.device("meta"):
        assert find_spacing(build_model(config)) == spacing


def test_what_goes_around_a_block_keeps_clips_where_they_are(jasper_config):
    """Dense residuals add what earlier blocks took, and a stride would need starts that divide by it."""
    first, middle, *_ = jasper_config.model.stages
    far = dataclasses.replace(middle, kernel=21, blocks=1)
    dense = dataclasses.replace(jasper_config.model, stages=(first, middle, far))
    strided = dataclasses.replace(dense, stages=(first, middle, dataclasses.replace(far, stride=2, residual=False)))
    for model in (dense, strided):
        assert find_spacing(build_model(dataclasses.replace(jasper_config, model=model))).block is None


def test_clips_that_hardly_need_gaps_at_first_have_one_to_be_moved_with(config, clips, frames, open_session):
    narrow = StageConfig(filters=64, kernel=1, residual=False, separable=False)
    stages = (dataclasses.replace(narrow, stride=2), narrow, narrow, StageConfig(filters=16, kernel=9, residual=False))
    network = build_model(dataclasses.replace(config, model=dataclasses.replace(config.model, stages=stages))).eval()
    assert find_spacing(network) == Spacing(2, 8, 3)
    session = open_session(export_ragged(network))
    batch, _ = run(session, clips, frames)
    for row, clip in enumerate(clips):
        alone, lengths = run(session, [clip], [clip.shape[1]])
        np.testing.assert_allclose(batch[row, : lengths[0, 0]], alone[0], atol=TOLERANCE)


def test_exporting_twice_gives_the_same_bytes(network):
    assert export_ragged(network).SerializeToString() == export_ragged(network).SerializeToString()


def test_onnxruntime_reports_to_nobody():
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
