from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from carnelian_perf.inference.engines import EngineError, _in_parts, build_engine
from carnelian_perf.networks import load_network
from carnelian_serving.backends.parts import MAX_RUN_ELEMENTS

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
