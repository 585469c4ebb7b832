"""What a recogniser's times and confidences mean: corrections that were measured on clips whose words are known.

A CTC network writes a character when it is sure of it, which is after it began; how late differs from network to
network. The least certain character of a word ranks words well, but is no probability that the word is right.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .hypothesis import Hypothesis, Word, mean_confidence

CERTAIN = 1e-3
"""Confidences are kept so far from 0 and 1."""


@dataclass(frozen=True)
class Calibration:
    """Corrections of one recogniser; without any, times are those of the network's frames."""

    start_late_s: float = 0.0
    """How long after a word has begun its first character is written."""
    end_late_s: float = 0.0
    """How long after a word has ended the frames of its last character end."""
    confidence: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Decoder -> scale and offset of the log-odds of a word's confidence."""

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read what :meth:`write` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "confidence": {k: (a, b) for k, (a, b) in content["confidence"].items()}})

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def apply(self, hypothesis: Hypothesis, decoder: str, frame_s: float) -> Hypothesis:
        """Correct the words of a hypothesis; they stay in order, apart, and at least a frame long."""
        if self == Calibration() or not hypothesis.words:
            return hypothesis
        words: list[Word] = []
        earliest = 0.0
        for word in hypothesis.words:
            start = max(word.start - self.start_late_s, earliest)
            end = max(word.end - self.end_late_s, start + frame_s)
            confidence = self.likelihood(word.confidence, decoder)
            words.append(Word(word.word, round(start, 3), round(end, 3), confidence))
            earliest = end
        return replace(hypothesis, words=tuple(words), confidence=mean_confidence(words))

    def likelihood(self, confidence: float, decoder: str) -> float:
        """The probability that a word of this confidence is right."""
        if decoder not in self.confidence:
            return confidence
        scale, offset = self.confidence[decoder]
        bounded = min(max(confidence, CERTAIN), 1 - CERTAIN)
        return round(1 / (1 + math.exp(-(scale * math.log(bounded / (1 - bounded)) + offset))), 4)
