"""A recogniser to evaluate: its network, and a decoder of its labels."""

from pathlib import Path

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.evaluation.evaluate import build_decoder
from carnelian_training.foreign.sources import load_model
from carnelian_training.models.network import CtcNetwork


def load_recogniser(
    path: Path, language_model: Path | None, neural_language_model: Path | None
) -> tuple[Config, CtcNetwork, ctc.Decoder]:
    """A checkpoint, ours or another toolkit's, and a decoder of its labels."""
    config, network = load_model(path)
    return config, network, build_decoder(config, language_model, neural_language_model=neural_language_model)
