"""Networks to measure: from a checkpoint, or with random weights, which do not change the speed."""

from collections.abc import Sequence
from pathlib import Path

import torch
from carnelian_training.checkpoint import build_model
from carnelian_training.config import Config
from carnelian_training.foreign.sources import load_model
from carnelian_training.front_end import channels
from carnelian_training.models.masked import MaskedBatchNorm
from carnelian_training.models.network import CtcNetwork
from carnelian_training.run_config import load_config


def is_untrained(source: Path) -> bool:
    """Whether a source is a training YAML, whose network gets random weights, and no checkpoint."""
    return source.suffix in (".yaml", ".yml")


def load_network(source: Path, overrides: Sequence[str] = ()) -> tuple[Config, CtcNetwork]:
    """Load a checkpoint, or build a training YAML's network with random weights.

    Raises:
        ValueError: There is no such network, or there are overrides of a checkpoint.
    """
    if not is_untrained(source):
        if overrides:
            raise ValueError(f"--set must go with a training YAML, but {source} is a checkpoint")
        return load_model(source)
    config = load_config(source, tuple(overrides))
    torch.manual_seed(0)
    network = build_model(config).eval()
    _settle(network, channels(config.features))
    return config, network


def _settle(network: CtcNetwork, num_channels: int) -> None:
    """Make batch norms pass a signal on, as those of a trained network do.

    With the statistics of a new network it fades from layer to layer, and with biases of 0 rounding grows to its size:
    rounding would decide the texts.
    """
    norms = [module for module in network.modules() if isinstance(module, MaskedBatchNorm)]
    if not norms:
        return
    usual = norms[0].momentum
    for norm in norms:
        torch.nn.init.ones_(norm.bias)
        norm.train().momentum = 1
    frames = 400  # enough for the statistics, whatever the stride
    with torch.inference_mode():
        network(torch.randn(2, num_channels, frames), torch.tensor([frames, frames]))
    for norm in norms:
        norm.eval().momentum = usual


def export_random(
    repository: Path, name: str, source: Path, precision: str = "fp32", provider: str | None = None
) -> None:
    """Export the network of a training YAML with random weights into a repository, as the model `name`."""
    from carnelian_export.repository import write_model
    from carnelian_export.target import Target

    write_model(repository, name, *load_network(source), target=Target(precision=precision, provider=provider))
