"""Networks to measure: from a checkpoint, or with random weights, which do not change the speed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from carnelian_training.checkpoint import build_model, load_model
from carnelian_training.config import Config
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
    return config, build_model(config).eval()


def export_random(sources: Mapping[str, Path], repository: Path) -> None:
    """Export networks with random weights into a repository; `sources` is name of the model -> training YAML."""
    from carnelian_export.repository import write_model

    for name, source in sources.items():
        write_model(repository, name, *load_network(source))
