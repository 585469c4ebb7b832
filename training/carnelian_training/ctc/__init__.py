"""CTC decoding: from log-probabilities to text, words with times and confidence, and alternative readings.

`carnelian-export` copies this folder unchanged into ``<model>_ctc``, so offline evaluation and the server decode with
the same code. It needs only numpy; an n-gram language model also needs KenLM, and a neural one ONNX Runtime and
sentencepiece.
"""

from .calibration import Calibration
from .decoder import Decoder, MissingPackage
from .hypothesis import Alternative, Hypothesis, Word
from .options import DECODERS, OptionError, Options, split_assignments

__all__ = [
    "DECODERS",
    "Alternative",
    "Calibration",
    "Decoder",
    "Hypothesis",
    "MissingPackage",
    "OptionError",
    "Options",
    "Word",
    "split_assignments",
]
