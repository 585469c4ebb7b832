import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import soundfile
import torch
from carnelian_export import parity
from carnelian_export.graph import quantise
from carnelian_export.graph.quantise import QuantisationError, read_features
from carnelian_export.model_configs import TensorSizes, build_configs
from carnelian_export.parity import ParityError, run, score
from carnelian_export.target import Target, TargetError
from carnelian_training.models.masked import MaskedBatchNorm

# One step of 8 bits here or there, where kernels add float32 in another order.
TOLERANCE = 0.05
INT8 = onnx.TensorProto.INT8


@pytest.fixture
def path(network, clips, tmp_path):
    onnx.save(quantise.quantise(network, clips), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def session(path):
    return parity.open_graph(path)


def test_the_labels_are_declared_as_in_the_configuration(session, config):
    assert session.get_outputs()[0].shape[2] == len(config.labels) + 1


def test_every_convolution_of_the_blocks_is_in_integers(network, clips, tmp_path):
    for module in network.modules():
        if isinstance(module, MaskedBatchNorm):  # equal biases, which the exporter stores once
            torch.nn.init.zeros_(module.bias)
            torch.nn.init.zeros_(module.running_mean)
    path = tmp_path / "model.onnx"
    onnx.save(quantise.quantise(network, clips), path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path.with_suffix(".optimised.onnx"))
    onnxruntime.InferenceSession(str(path), options)
    kinds = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert kinds.count("QLinearConv") == 10
    assert [kind for kind in kinds if "Conv" in kind and kind != "QLinearConv"] in (["Conv"], ["FusedConv"])  # the head
    assert not any(kind.startswith("DynamicQuantize") for kind in kinds)
    assert "QLinearWhere" not in kinds
    assert kinds.count("Transpose") <= 4  # once into the layout of the integers' kernels, and once back


def test_no_advice_to_preprocess_is_logged_and_no_mark_against_it_is_left(network, clips, caplog):
    graph = quantise.quantise(network, clips)
    assert not caplog.records
    assert not [prop for prop in graph.metadata_props if "pre_process" in prop.key]


def test_each_channel_of_a_weight_has_a_scale_of_its_own(network, clips):
    graph = quantise.quantise(network, clips).graph
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    dequantised = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    convolutions = [node for node in graph.node if node.op_type == "Conv" and node.input[1] in dequantised]
    assert len(convolutions) == 10
    for node in convolutions:
        weight, scale = (tensors[name] for name in dequantised[node.input[1]].input[:2])
        assert scale.shape == (len(weight),)


def test_two_products_never_overflow_sixteen_bits(path):
    """CPUs without VNNI add them there, and a larger sum would be cut off without a word."""
    graph = onnx.load(path).graph
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.data_type == INT8]
    kernels = [weight.astype(int) for weight in weights if weight.ndim == 4]
    assert len(kernels) == 10
    assert max(2 * 255 * np.abs(kernel).max() for kernel in kernels) <= np.iinfo(np.int16).max


def test_masks_of_integers_give_what_masks_of_numbers_gave(session, network, clips, frames, tmp_path, monkeypatch):
    monkeypatch.setattr(quantise, "_mask_integers", lambda _: None)
    onnx.save(quantise.quantise(network, clips), tmp_path / "numbers.onnx")
    expected, _ = run(parity.open_graph(tmp_path / "numbers.onnx"), clips, frames)
    found, _ = run(session, clips, frames)
    np.testing.assert_array_equal(found, expected)


def test_a_batch_says_what_each_clip_alone_says(session, clips, frames):
    batch, lengths = run(session, clips, frames)
    assert lengths.tolist() == [[1], [19], [100], [45]]
    for row, clip in enumerate(clips):
        alone, _ = run(session, [clip], [clip.shape[1]])
        np.testing.assert_allclose(batch[row, : lengths[row, 0]], alone[0], atol=TOLERANCE)


def test_it_is_near_the_network_on_clips_and_refused_if_not(path, network, clips, monkeypatch):
    distance = parity.check_distributions(path, network, clips)
    assert 0 < distance < parity.MEAN_DISTANCE
    monkeypatch.setattr(parity, "MEAN_DISTANCE", distance / 2)
    with pytest.raises(ParityError, match=r"^tiny: .* of int8 must be within .* over 4 clips, but differ by"):
        parity.check_distributions(path, network, clips, "tiny")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_value_shows_in_its_row_alone(session, clips, frames, value):
    before, _ = run(session, clips, frames)
    clips[1][:] = value
    after, _ = run(session, clips, frames)
    assert np.isnan(after[1, :19]).all()
    for row in (0, 2, 3):
        np.testing.assert_array_equal(after[row], before[row])


def test_one_loud_moment_does_not_make_the_steps_of_all_clips_coarse(network, tmp_path):
    rng = np.random.default_rng(1)
    calibration = [rng.standard_normal((64, 500), np.float32) for _ in range(8)]
    others = [rng.standard_normal((64, 500), np.float32) for _ in range(2)]
    distances = []
    for factor in (1, 100):
        calibration[0][:, 250] *= factor
        onnx.save(quantise.quantise(network, calibration), tmp_path / "model.onnx")
        distances.append(parity.check_distributions(tmp_path / "model.onnx", network, others))
    assert distances[1] < 2 * distances[0]


def test_jasper_has_an_int8_form_too(jasper, clips, tmp_path):
    onnx.save(quantise.quantise(jasper, clips), tmp_path / "model.onnx")
    found, _ = run(parity.open_graph(tmp_path / "model.onnx"), [clips[2]], [200])
    expected, _ = score(jasper, clips[2], 200)
    assert np.abs(np.exp(found[0]) - np.exp(expected)).sum(1).mean() < parity.MEAN_DISTANCE


def test_int8_needs_clips_and_nothing_else_takes_them(tmp_path, config):
    with pytest.raises(TargetError, match=r"--int8-clips must name a manifest .*, but is not given$"):
        Target(precision="int8")
    with pytest.raises(TargetError, match="is for that alone"):
        Target(int8_clips=tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(QuantisationError, match=r"at least one clip, but .*empty\.jsonl has none"):
        read_features(tmp_path / "empty.jsonl", config)


@pytest.mark.parametrize(("sound", "heard"), [(np.zeros(160_000), "0.0"), (np.sin(np.arange(48_000) ** 1.5), "3.0")])
def test_too_little_to_calibrate_on_is_refused(tmp_path, config, sound, heard):
    """Such a network passed, for it was compared with PyTorch's on those clips alone; on others it was noise."""
    soundfile.write(tmp_path / "a.wav", sound * 0.1, 16_000)
    line = {"audio_filepath": "a.wav", "duration": len(sound) / 16_000, "text": ""}
    (tmp_path / "little.jsonl").write_text(json.dumps(line))
    with pytest.raises(QuantisationError, match=rf"at least 5 s of sound, but .*little\.jsonl has {heard} s that"):
        read_features(tmp_path / "little.jsonl", config)


def test_silent_clips_are_not_calibrated_on(tmp_path, config):
    lines = []
    for name, sound in (("silence", np.zeros(160_000)), ("noise", np.sin(np.arange(160_000) ** 1.5))):
        soundfile.write(tmp_path / f"{name}.wav", sound * 0.1, 16_000)
        lines.append(json.dumps({"audio_filepath": f"{name}.wav", "duration": 10, "text": ""}))
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines))
    calibration, comparison = read_features(tmp_path / "manifest.jsonl", config)
    silence, noise = comparison
    assert np.ptp(silence) < 1e-3
    np.testing.assert_array_equal(*calibration, noise)


def test_it_stays_on_the_cpu_of_a_machine_with_a_gpu():
    sizes = TensorSizes(features=(64, -1), hop_samples=160, max_batch_size=32, vocabulary=29)
    target = Target(precision="int8", int8_clips=Path("dev.jsonl"))
    (group,) = build_configs("tiny", sizes, {}, target)["tiny_acoustic"].instance_group
    assert group.kind == group.KIND_CPU


def test_clips_come_from_all_over_a_manifest_and_others_are_compared_with(config, monkeypatch):
    manifest = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
    everything, compared = read_features(manifest, config)
    assert len(everything) == len(compared) == 6
    monkeypatch.setattr(quantise, "MOST_CLIPS", 2)
    calibration, comparison = read_features(manifest, config)
    for found, clip in zip([*calibration, *comparison], [*everything[::3], *everything[1::3]], strict=True):
        np.testing.assert_array_equal(found, clip)
