from pathlib import Path

import torch
from carnelian_perf.networks import load_network

ROOT = Path(__file__).parents[2]


def test_training_yaml_gives_the_same_random_weights_each_time():
    source = ROOT / "training/configs/quartznet_demo.yaml"
    first, second = (load_network(source)[1] for _ in range(2))
    assert not first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
