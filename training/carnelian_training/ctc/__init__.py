"""CTC decoding: log-probabilities to text, words with times and confidence, and other readings.

`carnelian-export` copies this folder, as it is, into ``<model>_ctc``: offline evaluation and the server decode with the
same code. It needs numpy alone; KenLM where there is an n-gram language model, ONNX Runtime and sentencepiece
where there is a neural one.
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
