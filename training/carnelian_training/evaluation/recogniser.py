"""Loading a recogniser for evaluation: its network, a decoder of its labels, and the decoder's default options."""

from pathlib import Path

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.evaluation.evaluate import build_decoder
from carnelian_training.foreign.sources import load_model
from carnelian_training.language_models.weights import read_weights
from carnelian_training.models.network import CtcNetwork


def load_recogniser(
    path: Path, language_model: Path | None, neural_language_model: Path | None, lm_weights: Path | None = None
) -> tuple[Config, CtcNetwork, ctc.Decoder, ctc.Options]:
    """Load a checkpoint, Carnelian's or another toolkit's, and build a decoder of its labels.

    The language models are an ARPA file or KenLM binary, and an ONNX file. `lm_weights`, a file of `carnelian-train
    weigh`, changes the decoder's default options. Times and confidences of words are the network's own, without the
    corrections of an export: :func:`.build_decoder` takes a `calibration`.
    """
    weights = read_weights(lm_weights, language_model, neural_language_model)
    config, network = load_model(path)
    decoder = build_decoder(config, language_model, neural_language_model=neural_language_model)
    return config, network, decoder, decoder.change_options(weights)
