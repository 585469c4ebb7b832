import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from carnelian_export import acoustic
from carnelian_export.engine import EngineError
from carnelian_export.engine import build_engine as build_plan
from carnelian_export.graph.to_onnx import OUTPUTS
from carnelian_export.parity import TOLERANCES
from carnelian_perf.inference import engines
from carnelian_perf.inference.engines import _in_parts, build_engine
from carnelian_perf.networks import load_network
from carnelian_serving.backends.parts import MAX_RUN_ELEMENTS
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config

ROOT = Path(__file__).parents[3]


def test_a_large_batch_runs_in_parts_and_keeps_its_order():
    sizes = []

    def run(features, lengths):
        sizes.append(len(features))
        return np.stack([features[:, 0, 0], lengths], 1)

    frames = MAX_RUN_ELEMENTS // 64 // 3
    features = np.zeros((7, 64, frames), np.float32)
    features[:, 0, 0] = np.arange(7)
    found = _in_parts(run)(features, np.arange(7, dtype=np.int32))
    assert sizes == [3, 3, 1]
    np.testing.assert_array_equal(found, np.stack([np.arange(7)] * 2, 1))


def test_onnxruntime_without_its_cuda_libraries_is_not_measured_on_the_cpu(monkeypatch):
    found = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: found)  # as onnxruntime-gpu has it anywhere
    _, network = load_network(ROOT / "demo/quartznet_demo.pt")
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(EngineError, match="cannot load CUDA"):
        build_engine("onnx", network, "cuda", "fp32", 1)


@pytest.fixture(params=["quartznet", "wav2vec2"])
def network(request):
    if request.param == "quartznet":
        return load_network(ROOT / "demo/quartznet_demo.pt")[1]
    torch.manual_seed(0)
    sizes = {"conv_channels": (8,) * 3, "conv_kernels": (10, 4, 4), "conv_strides": (8, 4, 4), "width": 16, "heads": 2}
    return Wav2Vec2(Wav2Vec2Config(**sizes, layers=1, feed_forward=16, position_kernel=16, position_groups=2), 4).eval()


def test_a_graph_over_the_limit_of_a_file_runs_in_onnxruntime_too(network, monkeypatch):
    monkeypatch.setattr(acoustic, "MOST_BYTES", 0)
    features = np.random.default_rng(0).standard_normal((2, network.config.feature_channels, 4000), np.float32)
    lengths = np.array([4000, 4000], np.int32)
    found, expected = (build_engine(name, network, "cpu", "fp32", 1)(features, lengths) for name in ("onnx", "eager"))
    np.testing.assert_allclose(found, expected, atol=TOLERANCES["fp32"].worst)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tensorrt_gets_a_plan_for_the_shape_of_each_batch(network, precision, monkeypatch):
    """The plans are built; their graphs run in ONNX Runtime in their place, for want of a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu12 is not installed")
    built = []

    def build(graph, profiles, **options):
        assert len(build_plan(graph, profiles, **options)) > 10_000
        assert options == {"tf32": precision == "tf32"}
        (shapes,) = profiles
        built.append(shapes["REQUEST_SIZES"][1][0])
        assert all(tuned <= most for _, tuned, most in shapes.values())
        tuned = {name: shape for name, (_, shape, _) in shapes.items()}
        session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])

        def run(inputs, position):
            assert position == 0
            assert {name: tuple(value.shape) for name, value in inputs.items()} == tuned
            found = session.run(OUTPUTS, {tensor.name: inputs[tensor.name].numpy() for tensor in session.get_inputs()})
            return dict(zip(OUTPUTS, map(torch.from_numpy, found), strict=True))

        return run

    monkeypatch.setattr(engines, "build_plan", build)
    monkeypatch.setattr(engines, "EngineRun", lambda run: run)
    run = build_engine("tensorrt", network, "cuda", precision, 1)
    eager = build_engine("eager", network, "cpu", "fp32", 1)
    rng = np.random.default_rng(0)
    channels, steps = (1, 8000) if isinstance(network, Wav2Vec2) else (64, 100)
    for rows in (1, 2, 2):
        features, lengths = rng.standard_normal((rows, channels, steps), np.float32), np.full(rows, steps, np.int32)
        np.testing.assert_allclose(run(features, lengths), eager(features, lengths), atol=TOLERANCES["fp32"].worst)
    assert built == [1, 2]


def test_without_tensorrt_the_engine_says_what_to_install(network, monkeypatch):
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match="pip install tensorrt"):
        build_engine("tensorrt", network, "cuda", "fp16", 1)
