"""wav2vec 2.0 as a served model: its graph against PyTorch, its folders."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from carnelian_export import acoustic
from carnelian_export.cli import main
from carnelian_export.graph.frame_scales import quantise_products
from carnelian_export.graph.quantise import quantise
from carnelian_export.graph.to_onnx import INPUTS, export_ragged
from carnelian_export.model_configs import read_config
from carnelian_export.parity import MEAN_DISTANCE, TOLERANCES, run, score
from carnelian_export.repository import write_model
from carnelian_export.target import Target, TargetError
from carnelian_training import waveform
from carnelian_training.checkpoint import build_model
from carnelian_training.config import config_from_dict

ROOT = Path(__file__).parents[2]
REFERENCES = ROOT / "tests" / "training" / "references"
# Kernels add the same float32 numbers in another order.
TOLERANCE = 1e-4
STEP = 0.05
"""One step of 8 bits here or there, for the same reason."""
SAMPLES = [130, 2611, 8000, 129, 4000]
FRAMES = [1, 20, 62, 0, 31]

TINY = {
    "name": "wav2vec2",
    "conv_channels": [16, 16, 16],
    "conv_kernels": [10, 4, 4],
    "conv_strides": [8, 4, 4],
    "width": 24,
    "layers": 4,
    "heads": 2,
    "feed_forward": 32,
    "position_kernel": 16,
    "position_groups": 2,
}
POOLED = {"before": 1, "pooled": 2, "after": 1, "factor": 3}
KINDS = {
    "base": {},
    "large": {"conv_norm": "layer", "norm_first": True, "conv_bias": True},
    "adapters": {"conv_norm": "layer", "norm_first": True, "adapter_width": 4},
    "hourglass": {"hourglass": POOLED},
    "hourglass, linear": {"hourglass": POOLED | {"resampling": "linear"}, "norm_first": True},
}


PUBLISHED_STRIDES = {
    "conv_channels": [8] * 7,
    "conv_kernels": [10, 3, 3, 3, 3, 2, 2],
    "conv_strides": [5, 2, 2, 2, 2, 2, 2],
}


def built(kind: str, **model: object):
    config = config_from_dict({"name": "tiny", "model": TINY | KINDS[kind] | model}, "here")
    torch.manual_seed(0)
    network = build_model(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # norms and biases that do something
            parameter += 0.1 * torch.randn_like(parameter)
    return config, network


@pytest.fixture(scope="module", params=KINDS)
def exported(request, open_session):
    """A network and its graph in ONNX Runtime."""
    _, network = built(request.param)
    return network, open_session(export_ragged(network))


@pytest.fixture
def clips():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(samples, np.float32) for samples in SAMPLES]


def test_for_cuda_the_graph_and_its_warm_ups_are_the_ordinary_ones(tmp_path):
    config, network = built(next(iter(KINDS)))
    for provider in (None, "cuda"):
        write_model(tmp_path / str(provider), "tiny", config, network, target=Target(provider=provider))
    plain, cuda = (tmp_path / name / "tiny_acoustic" for name in ("None", "cuda"))
    assert (cuda / "1/model.onnx").read_bytes() == (plain / "1/model.onnx").read_bytes()
    assert (cuda / "config.pbtxt").read_text() == (plain / "config.pbtxt").read_text()


def test_the_labels_are_declared_as_in_the_configuration(exported):
    network, session = exported
    assert session.get_outputs()[0].shape[2] == network.head.out_features


def test_a_ragged_batch_equals_each_clip_alone_in_pytorch(exported, clips):
    network, session = exported
    batch, lengths = run(session, clips, SAMPLES)
    assert lengths[:, 0].tolist() == FRAMES
    for row, clip in enumerate(clips):
        expected, end = score(network, clip, len(clip))
        np.testing.assert_allclose(batch[row, :end], expected, atol=TOLERANCE)
        alone, _ = run(session, [clip], [len(clip)])
        np.testing.assert_allclose(alone[0, :end], expected, atol=TOLERANCE)
        assert not batch[row, end:].any()


def test_a_bad_value_stays_in_its_row_and_lengths_are_told_as_they_came(exported, clips):
    _, session = exported
    before, _ = run(session, clips, SAMPLES)
    clips[1][:] = np.nan
    clips[4][3000:] = np.inf  # past the clip's end: nobody hears it
    after, lengths = run(session, clips, [0, 2611, 9000, -(2**31), 3000])
    assert lengths[:, 0].tolist() == [0, 20, 70, 0, 23]  # 9000 is more than there is
    assert np.isnan(after[1, :20]).any()
    np.testing.assert_allclose(after[2], before[2], atol=TOLERANCE)
    assert not after[2, 62:].any()
    assert np.isfinite(after[4]).all()


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_minute_of_silence_with_an_offset_is_heard_as_in_pytorch(open_session, noise):
    """Its mean is a sum of 192,000 numbers, and what is wrong with it is multiplied by 316."""
    _, network = built("base", **PUBLISHED_STRIDES)
    clip = 0.5 + noise * np.random.default_rng(0).standard_normal(960_000, np.float32)
    expected, end = score(network, clip, len(clip))
    found, _ = run(open_session(export_ragged(network)), [clip], [len(clip)])
    np.testing.assert_allclose(found[0, :end], expected, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_has_no_guard_against_nan(kind):
    """PyTorch exports one for a boolean mask; on a clip of a minute it took a sixth of the network's time."""
    graph = export_ragged(built(kind)[1]).graph
    assert "IsNaN" not in {node.op_type for node in graph.node}


def test_rows_without_samples_pass(exported):
    log_probs, lengths = run(exported[1], [np.zeros(0, np.float32)] * 2, [0, 0])
    assert log_probs.shape[0] == 2
    assert not lengths.any()


def test_the_folders_hold_a_waveform_model(tmp_path):
    config, network = built("base")
    difference = write_model(tmp_path, "tiny", config, network)
    assert difference < TOLERANCE
    features = read_config(tmp_path / "tiny_features" / "config.pbtxt")
    acoustic = read_config(tmp_path / "tiny_acoustic" / "config.pbtxt")
    assert list(features.output[0].dims) == list(acoustic.input[0].dims) == [-1]
    assert features.max_batch_size == acoustic.max_batch_size == 8
    assert list(acoustic.model_warmup[0].inputs["FEATURES"].dims) == [32_000]
    stage = tmp_path / "tiny_features" / "1"
    assert (stage / "dali.py").read_bytes() == Path(waveform.__file__).read_bytes()
    settings = json.loads((stage / "features.json").read_text())
    assert settings == {"max_audio_s": 60.0, "name": "waveform", "normalise": True, "variance_guard": 1e-7}
    decoder = json.loads((tmp_path / "tiny_ctc" / "1" / "ctc.json").read_text())
    assert (decoder["min_samples"], decoder["frame_s"]) == (130, 0.008)
    graph = onnx.load(tmp_path / "tiny_acoustic" / "1" / "model.onnx").graph
    assert [tensor.name for tensor in graph.input] == list(INPUTS)
    weights = {tensor.name for tensor in graph.initializer}
    assert all(node.input[1] in weights for node in graph.node if node.op_type == "Conv")


@pytest.mark.parametrize("kind", KINDS)
def test_float16_stays_within_its_tolerance(kind, tmp_path):
    config, network = built(kind)
    difference = write_model(tmp_path, "tiny", config, network, target=Target(precision="fp16"))
    assert 1e-5 < difference <= TOLERANCES["fp16"].worst


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_attention_over_a_long_loud_clip_in_float16_stay_within_the_tolerance(kind, open_session):
    _, network = built(kind)
    clip = 20 * np.random.default_rng(0).standard_normal(320_000, np.float32)
    expected, frames = score(network, clip, len(clip))
    assert frames == 2499
    found, _ = run(open_session(export_ragged(network, torch.float16)), [clip], [len(clip)])
    difference = np.abs(found[0] - expected)
    assert 1e-5 < difference.max() <= TOLERANCES["fp16"].worst
    assert difference.mean() <= TOLERANCES["fp16"].mean


def test_weights_that_no_onnx_file_holds_lie_beside_it_and_score_the_same(tmp_path, monkeypatch, clips):
    config, network = built("base")
    write_model(tmp_path / "one", "tiny", config, network)
    monkeypatch.setattr(acoustic, "MOST_BYTES", 10_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    write_model(tmp_path / "two", "tiny", config, network)
    assert not list((tmp_path / "scratch").iterdir())
    one, two = (tmp_path / folder / "tiny_acoustic" / "1" for folder in ("one", "two"))
    assert [path.name for path in one.iterdir()] == ["model.onnx"]
    graph, weights = sorted(two.iterdir())
    assert (graph.name, weights.name) == ("model.onnx", "model.onnx.data")
    assert weights.stat().st_size > sum(2 * p.numel() for p in network.parameters())  # most of them, of 4 bytes each
    assert graph.stat().st_mode == weights.stat().st_mode
    two.rename(tmp_path / "moved")
    sessions = (onnxruntime.InferenceSession(str(folder / "model.onnx")) for folder in (one, tmp_path / "moved"))
    (expected, _), (found, _) = (run(session, clips, SAMPLES) for session in sessions)
    np.testing.assert_array_equal(found, expected)


FP16 = r"; export with `--precision fp16`$"


@pytest.mark.parametrize(
    ("width", "target", "message"),
    [
        (1280, {"format": "tensorrt"}, rf"must take less than 2 GiB, but .* take 3\.59 GiB in fp32{FP16}"),
        (1280, {"provider": "tensorrt"}, rf"take 3\.59 GiB in fp32{FP16}"),
        (1920, {"format": "tensorrt"}, r"take 8\.04 GiB in fp32$"),
        (1920, {"format": "tensorrt", "precision": "fp16"}, r"take 4\.02 GiB in fp16$"),
    ],
)
def test_a_network_too_large_for_tensorrt_is_refused_before_it_is_traced(tmp_path, width, target, message):
    """XLS-R of 1 and 2 billion parameters."""
    model = {"name": "wav2vec2", "width": width, "layers": 48, "heads": 16, "feed_forward": 4 * width}
    config = config_from_dict({"name": "large", "model": model}, "here")
    with torch.device("meta"):
        network = build_model(config).eval()
    with pytest.raises(TargetError, match=message):
        write_model(tmp_path, "large", config, network, target=Target(**target))
    assert not list(tmp_path.iterdir())


def test_a_hugging_face_folder_is_exported_as_it_is(tmp_path, call):
    status, out, _ = call(main, REFERENCES / "wav2vec2_large", "--name", "large", "--repository", tmp_path)
    assert status == 0
    assert "large and large_pcm are in" in out
    assert json.loads((tmp_path / "large_ctc" / "1" / "ctc.json").read_text())["labels"] == [" ", *"eta'z"]


def test_a_pretrained_folder_is_refused(tmp_path, call):
    status, _, err = call(main, REFERENCES / "wav2vec2_pretraining", "--name", "x", "--repository", tmp_path)
    assert status == 1
    assert "was pre-trained and knows no letters yet" in err


def test_in_int8_every_product_with_weights_but_the_heads_is_in_integers():
    _, network = built("adapters")
    graph = quantise(network, []).graph
    kinds = [node.op_type for node in graph.node]
    # Of each of 4 layers: query, key, value, output, 2 of the feed-forward, 2 of the adapter; and the projection.
    assert kinds.count("MatMulIntegerToFloat") == 4 * 8 + 1
    assert kinds.count("QuantizeLinear") == 4 * 6 + 1  # query, key and value have the same frames
    assert kinds.count("MatMul") == 4 * 2 + 1  # attention itself, and the head
    kept = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    assert [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in kept] == [
        "/network/head/MatMul"
    ]


def test_in_int8_weights_have_7_bits_and_zeros_stay_zeros(open_session):
    product = "product (float[frames, 3] X) => (float[frames, 2] Y) { Y = MatMul(X, W) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {product}')
    weight = np.array([[1, 0], [-2, 0], [0.5, 0]], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    quantise_products(model)
    (integers,) = (onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == "W")
    assert np.abs(integers).max() == 63
    (found,) = open_session(model).run(None, {"X": np.array([[0, 0, 0], [1, 1, 1]], np.float32)})
    np.testing.assert_allclose(found, [[0, 0], [-0.5, 0]], atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_in_int8_a_batch_says_what_each_clip_alone_says_and_nearly_what_pytorch_says(kind, open_session, clips):
    _, network = built(kind)
    session = open_session(quantise(network, []))
    batch, _ = run(session, clips, SAMPLES)
    for row, clip in enumerate(clips):
        expected, end = score(network, clip, len(clip))
        alone, _ = run(session, [clip], [len(clip)])
        np.testing.assert_allclose(batch[row, :end], alone[0, :end], atol=STEP)
        assert not batch[row, end:].any()
        if end:
            assert np.abs(np.exp(alone[0, :end]) - np.exp(expected)).sum(1).mean() < MEAN_DISTANCE / 5


@pytest.mark.parametrize("kind", KINDS)
def test_in_int8_a_clip_says_to_the_bit_the_same_beside_longer_ones(kind, open_session):
    """One number that is rounded to another step changes others in the layers that follow, and then a letter."""
    _, network = built(kind, width=32)  # 16 channels in each group, for the kernel that runs published networks
    session = open_session(quantise(network, []))
    rng = np.random.default_rng(0)
    clips = [rng.standard_normal(samples, np.float32) for samples in (130, 2611, 12_345, 16_000, 31_234, 90_000)]
    for clip in clips[:-1]:
        alone, ends = run(session, [clip], [len(clip)])
        for other in clips:
            beside, _ = run(session, [clip, other], [len(clip), len(other)])
            np.testing.assert_array_equal(beside[0, : ends[0, 0]], alone[0, : ends[0, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_in_int8_a_bad_value_is_told_and_stays_in_its_row(bad, open_session, clips):
    _, network = built("base")
    session = open_session(quantise(network, []))
    before, _ = run(session, clips, SAMPLES)
    clips[2][4000] = bad
    after, _ = run(session, clips, SAMPLES)
    assert np.isnan(after[2]).any()
    for row in (0, 1, 4):
        np.testing.assert_allclose(after[row], before[row], atol=STEP)


def test_equal_weights_are_rounded_to_int8_once(open_session, clips):
    _, network = built("base")
    for layer in network.layers:
        layer.attention.key.weight = layer.attention.query.weight  # which the exporter stores once
    session = open_session(quantise(network, []))
    expected, end = score(network, clips[2], SAMPLES[2])
    found, _ = run(session, clips[2:3], SAMPLES[2:3])
    assert np.abs(np.exp(found[0, :end]) - np.exp(expected)).sum(1).mean() < MEAN_DISTANCE / 5


@pytest.mark.parametrize("normalise", [True, False])
def test_int8_is_compared_on_real_clips(tmp_path, normalise):
    config, network = built("large")
    config = replace(config, features=replace(config.features, normalise=normalise))
    manifest = ROOT / "demo" / "clips" / "manifest.jsonl"
    for precision in ("fp32", "int8"):
        target = Target(precision=precision, int8_clips=manifest if precision == "int8" else None)
        difference = write_model(tmp_path / precision, "tiny", config, network, target=target)
    assert 1e-4 < difference < MEAN_DISTANCE / 5
    assert json.loads((tmp_path / "int8/tiny_ctc/1/ctc.json").read_text())["labels"]
