from pathlib import Path

import onnx
import pytest
import torch
from carnelian_perf.networks import export_random, load_network

ROOT = Path(__file__).parents[2]


def test_training_yaml_gives_the_same_random_weights_each_time():
    source = ROOT / "training/configs/quartznet_demo.yaml"
    first, second = (load_network(source)[1] for _ in range(2))
    assert not first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_random_weights_hear_what_is_said_and_no_rounding():
    _, network = load_network(ROOT / "training/configs/quartznet_15x5.yaml")
    features, lengths = torch.randn(2, 64, 300), torch.tensor([300, 300])
    with torch.inference_mode():
        log_probs, _ = network(features, lengths)
        exact, _ = network.double()(features.double(), lengths)
    rounding, signal = (log_probs - exact).abs().max(), log_probs.std(1).mean()
    assert rounding < 0.01 * signal  # without a signal it is 4 % and more
    assert len(log_probs.argmax(2).unique()) > 5


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_random_weights_are_exported_for_cuda_only_if_asked_for(tmp_path, precision):
    source = ROOT / "training/configs/quartznet_demo.yaml"
    for provider in (None, "cuda"):
        export_random(tmp_path, "m", source, precision, provider)
        graph = onnx.load(tmp_path / "m_acoustic/1/model.onnx").graph
        assert any(node.op_type == "If" for node in graph.node) == (provider == "cuda")
