"""What a recogniser's times and confidences mean: corrections that were measured on clips whose words are known.

A CTC network writes a character when it is sure of it, which is after it began; how late differs from network to
network. The least certain character of a word ranks words well, but is no probability that the word is right.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .options import DECODERS

Times = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CERTAIN = 1e-3
"""Confidences are kept so far from 0 and 1."""
MAX_DELAY_S = 10.0


@dataclass(frozen=True)
class Calibration:
    """Corrections of one recogniser; without any, times are those of the network's frames."""

    start_late_s: float = 0.0
    """How long after a word has begun its first character is written."""
    end_late_s: float = 0.0
    """How long after a word has ended the frames of its last character end."""
    confidence: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Decoder -> scale and offset of the log-odds of a word's confidence."""

    def check(self) -> None:
        """See that it corrects what a recogniser may do.

        Raises:
            ValueError: It does not.
        """
        for delay_s in (self.start_late_s, self.end_late_s):
            if abs(delay_s) > MAX_DELAY_S:
                raise ValueError(f"delays must be at most {MAX_DELAY_S:g} s, but there is {delay_s:g}")
        for decoder, (scale, _) in self.confidence.items():
            if scale <= 0:
                raise ValueError(
                    f"the surer a word, the likelier it must be right, but the scale of {decoder} is {scale:g}; "
                    "calibrate on more clips"
                )

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read a file of :meth:`to_json`.

        Raises:
            ValueError: It cannot be read, or is another file.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            found = cls(**{**content, "confidence": {k: (a, b) for k, (a, b) in content["confidence"].items()}})
            if unknown := set(found.confidence) - set(DECODERS):
                raise ValueError(f"a decoder must be one of {', '.join(DECODERS)}, but there is {sorted(unknown)}")
            for number in (found.start_late_s, found.end_late_s, *chain(*found.confidence.values())):
                if type(number) not in (int, float) or not math.isfinite(number):
                    raise ValueError(f"corrections must be finite numbers, but there is {number!r}")
            found.check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} must be a file of `carnelian-perf words`, but is none: {why}") from error
        return found

    def to_json(self) -> str:
        """What :meth:`read` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def correct_times(self, starts: Times, ends: Times, shortest: int, is_first: Flags) -> tuple[Times, Times]:
        """Move words to where they are said; they stay in order, apart, and long enough.

        Args:
            starts: [words] milliseconds, of one clip or several, in order.
            ends: [words] milliseconds.
            shortest: milliseconds that a word lasts at least.
            is_first: [words] whether a clip begins with it.
        """
        starts = np.maximum(starts - round(1e3 * self.start_late_s), 0)
        ends = np.maximum(ends - round(1e3 * self.end_late_s), starts + shortest)
        # Ends of one clip must lie `shortest` apart. Less i * `shortest`, the i-th end must not fall: a running
        # maximum. `levels` lifts each clip above the one before, so that the maximum begins anew.
        numbers = np.arange(len(starts)) * shortest
        levels = is_first.cumsum() << 32
        ends = np.maximum.accumulate(ends - numbers + levels) - levels + numbers
        before = np.zeros_like(ends)
        before[1:] = ends[:-1]
        before[is_first] = 0
        return np.maximum(starts, before), ends

    def likelihoods(self, confidences: Floats, decoder: str) -> Floats:
        """The probabilities that words of these confidences are right."""
        if decoder not in self.confidence:
            return confidences
        scale, offset = self.confidence[decoder]
        return 1 / (1 + np.exp(-(scale * log_odds(confidences) + offset)))  # type: ignore[no-any-return]


def log_odds(confidences: Floats) -> Floats:
    """The log-odds of confidences; `carnelian-perf words` fits scales and offsets to the same."""
    bounded = np.clip(confidences, CERTAIN, 1 - CERTAIN)
    return np.log(bounded / (1 - bounded))
