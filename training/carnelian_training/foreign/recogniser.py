"""Loading a recogniser for evaluation: its network, and a decoder of its labels."""

from pathlib import Path

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.evaluation.evaluate import build_decoder
from carnelian_training.foreign.sources import load_model
from carnelian_training.models.network import CtcNetwork


def load_recogniser(
    path: Path, language_model: Path | None, neural_language_model: Path | None
) -> tuple[Config, CtcNetwork, ctc.Decoder]:
    """Load a checkpoint, Carnelian's or another toolkit's, and build a decoder of its labels.

    Args:
        path: the checkpoint.
        language_model: an ARPA file or KenLM binary, or None.
        neural_language_model: an ONNX file, or None.
    """
    config, network = load_model(path)
    return config, network, build_decoder(config, language_model, neural_language_model=neural_language_model)
