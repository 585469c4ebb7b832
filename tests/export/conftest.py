from pathlib import Path

import pytest
import torch
from carnelian_training.checkpoint import build_model, publish, save
from carnelian_training.config import Config
from carnelian_training.models.masked import MaskedBatchNorm
from carnelian_training.models.quartznet import QuartzNet, QuartzNetConfig, StageConfig


@pytest.fixture
def config() -> Config:
    """A tiny network with every kind of layer that QuartzNet has."""
    stages = (
        StageConfig(filters=16, kernel=5, stride=2, residual=False),
        StageConfig(filters=24, kernel=7, repeat=2),
        StageConfig(filters=16, kernel=9, dilation=2, residual=False),
        StageConfig(filters=32, kernel=1, residual=False, separable=False),
    )
    return Config(name="tiny", model=QuartzNetConfig(stages=stages))


@pytest.fixture
def network(config: Config) -> QuartzNet:
    torch.manual_seed(0)
    network = build_model(config).eval()
    for module in network.modules():
        if isinstance(module, MaskedBatchNorm):
            torch.nn.init.normal_(module.running_mean, std=0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
            torch.nn.init.normal_(module.bias, std=0.2)
    return network


@pytest.fixture
def checkpoint(config: Config, network: QuartzNet, tmp_path: Path) -> Path:
    """As published: float16 weights."""
    save(tmp_path / "full.pt", config, network.state_dict(), results={})
    publish(tmp_path / "full.pt", tmp_path / "tiny.pt")
    return tmp_path / "tiny.pt"
