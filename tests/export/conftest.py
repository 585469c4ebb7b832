from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from carnelian_training.checkpoint import build_model, publish, save
from carnelian_training.config import Config
from carnelian_training.models.blocks import StageConfig
from carnelian_training.models.jasper import JasperConfig, JasperStageConfig
from carnelian_training.models.masked import MaskedBatchNorm
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.quartznet import QuartzNetConfig


@pytest.fixture
def config() -> Config:
    """A tiny network with every kind of layer that QuartzNet has."""
    stages = (
        StageConfig(filters=16, kernel=5, stride=2, residual=False),
        StageConfig(filters=32, kernel=7, repeat=2),
        StageConfig(filters=16, kernel=9, dilation=2, residual=False),
        StageConfig(filters=32, kernel=1, residual=False, separable=False),
    )
    return Config(name="tiny", model=QuartzNetConfig(stages=stages))


@pytest.fixture
def jasper_config() -> Config:
    """A tiny network with every kind of layer that Jasper has."""
    stages = (
        JasperStageConfig(filters=16, kernel=5, stride=2, residual=False),
        JasperStageConfig(filters=24, kernel=7, blocks=2, repeat=2),
        JasperStageConfig(filters=48, kernel=9, repeat=2),
        JasperStageConfig(filters=16, kernel=9, dilation=2, residual=False),
    )
    return Config(name="tiny", model=JasperConfig(stages=stages))


@pytest.fixture
def network(config: Config) -> CtcNetwork:
    return trained(config)


@pytest.fixture
def jasper(jasper_config: Config) -> CtcNetwork:
    return trained(jasper_config)


def trained(config: Config) -> CtcNetwork:
    """A network whose batch norms do something."""
    torch.manual_seed(0)
    network = build_model(config).eval()
    for module in network.modules():
        if isinstance(module, MaskedBatchNorm):
            torch.nn.init.normal_(module.running_mean, std=0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
            torch.nn.init.normal_(module.bias, std=0.2)
    return network


@pytest.fixture(scope="session")
def open_session() -> Callable[[onnx.ModelProto], onnxruntime.InferenceSession]:
    """Opens a graph in ONNX Runtime on the CPU."""
    return lambda graph: onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture
def frames() -> list[int]:
    """How many each of `clips` has."""
    return [1, 37, 200, 90]


@pytest.fixture
def clips(frames: list[int]) -> list[np.ndarray]:
    """Features of noise."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((64, count), np.float32) for count in frames]


@pytest.fixture
def checkpoint(config: Config, network: CtcNetwork, tmp_path: Path) -> Path:
    """As published: float16 weights."""
    save(tmp_path / "full.pt", config, network.state_dict(), results={})
    publish(tmp_path / "full.pt", tmp_path / "tiny.pt")
    return tmp_path / "tiny.pt"


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Reads every file below a folder."""
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="session")
def folders() -> list[str]:
    """What an export named `tiny` writes into a repository, sorted."""
    return ["audio_decode", "tiny", "tiny_acoustic", "tiny_ctc", "tiny_features", "tiny_pcm"]
