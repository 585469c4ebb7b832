from pathlib import Path

import torch
from carnelian_perf.networks import load_network

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
