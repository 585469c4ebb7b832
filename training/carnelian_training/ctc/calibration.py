"""Corrections of a recogniser's times and confidences, measured on clips whose words are known.

A CTC network writes a character when it is sure of it, which is after the character began; the delay differs between
networks. The probability of a word's least certain character ranks words well, but is not the probability that the word
is right.
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
"""The distance that confidences keep from 0 and 1, so that log-odds stay finite."""
MAX_DELAY_S = 10.0


@dataclass(frozen=True)
class Calibration:
    """The corrections of one recogniser. The defaults correct nothing."""

    start_late_s: float = 0.0
    """The delay in seconds between the start of a word and the first frame of its first character."""
    end_late_s: float = 0.0
    """The delay in seconds between the end of a word and the end of its last character's frames."""
    confidence: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For each decoder, scale and offset of the log-odds of a word's confidence."""
    model: str = ""
    """The name of the network that was measured; empty if unknown."""

    def check(self) -> None:
        """Check that the corrections are plausible.

        Raises:
            ValueError: A delay is above `MAX_DELAY_S`, or a scale is not positive.
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
        """Read a file of `carnelian-perf words`, with the content of :meth:`to_json`.

        Raises:
            ValueError: The file cannot be read, or is not such a file.
        """
        wanted = f"{path} must be a file of `carnelian-perf words`"
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            found = cls(**{**content, "confidence": {k: (a, b) for k, (a, b) in content["confidence"].items()}})
            if unknown := set(found.confidence) - set(DECODERS):
                raise ValueError(f"a decoder must be one of {', '.join(DECODERS)}, but there is {sorted(unknown)}")
            for number in (found.start_late_s, found.end_late_s, *chain(*found.confidence.values())):
                if type(number) not in (int, float) or not math.isfinite(number):
                    raise ValueError(f"corrections must be finite numbers, but there is {number!r}")
            if type(found.model) is not str:
                raise ValueError(f"a model must have a name, but there is {found.model!r}")
            found.check()
        except OSError as error:
            raise ValueError(f"{wanted}, but it cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{wanted}, but it has other content") from error
        except ValueError as error:
            raise ValueError(f"{wanted}, but is none: {error}") from error
        return found

    def to_json(self) -> str:
        """Return the corrections as JSON, which :meth:`read` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def correct_times(
        self, starts: Times, ends: Times, shortest: int, is_first: Flags, clip_ends: Times
    ) -> tuple[Times, Times]:
        """Correct the times of words; they stay in order and in their clip, do not overlap, and keep a least length.

        Args:
            starts: [words] starts in milliseconds, of one clip or several, in order.
            ends: [words] ends in milliseconds.
            shortest: the least length of a word in milliseconds.
            is_first: [words] whether the word is the first of a clip.
            clip_ends: [words] end of the word's clip in milliseconds, with room for all its words.

        Returns:
            Corrected starts and ends, [words] int64 milliseconds each.
        """
        starts = np.maximum(starts - round(1e3 * self.start_late_s), 0)
        ends = np.maximum(ends - round(1e3 * self.end_late_s), starts + shortest)
        # Ends of one clip must lie at least `shortest` apart: after subtracting i * `shortest` from the i-th end, they
        # must not decrease, which a running maximum ensures. `levels` raises each clip above the one before, so that
        # the maximum starts again with each clip.
        numbers = np.arange(len(starts)) * shortest
        levels = is_first.cumsum() << 32
        ends = np.maximum.accumulate(ends - numbers + levels) - levels + numbers
        first = is_first.nonzero()[0]
        counts = np.diff(first, append=len(starts))
        last = np.repeat(first + counts - 1, counts)
        ends = np.minimum(ends, clip_ends - (numbers[last] - numbers))  # leaves room for the clip's later words
        before = np.zeros_like(ends)
        before[1:] = ends[:-1]
        before[is_first] = 0
        return np.minimum(np.maximum(starts, before), ends - shortest), ends

    def likelihoods(self, confidences: Floats, decoder: str) -> Floats:
        """Return the probability that each word is right, [words]; `confidences` if `decoder` is not calibrated."""
        if decoder not in self.confidence:
            return confidences
        scale, offset = self.confidence[decoder]
        return 1 / (1 + np.exp(-(scale * log_odds(confidences) + offset)))  # type: ignore[no-any-return]


def log_odds(confidences: Floats) -> Floats:
    """Return the log-odds of confidences; `carnelian-perf words` fits scales and offsets to these."""
    bounded = np.clip(confidences, CERTAIN, 1 - CERTAIN)
    return np.log(bounded / (1 - bounded))
