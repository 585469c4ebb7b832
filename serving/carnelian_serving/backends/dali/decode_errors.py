"""Counts files that cannot be decoded, by reason: Triton has one number for all errors of an ensemble."""

from __future__ import annotations

from carnelian_serving.backends.counter import Counter
from carnelian_serving.backends.dali.pipeline import TOO_LITTLE_MEMORY

METRIC = "carnelian_decode_errors_total"
EMPTY, FORMAT, MEMORY, DAMAGED = REASONS = ("empty", "format", "memory", "damaged")


class DecodeErrors:
    """The counters of one instance of a model."""

    def __init__(self, model: str) -> None:
        """Register a counter for each reason."""
        self._counters = {
            reason: Counter(METRIC, "Files that could not be decoded, by reason.", model=model, reason=reason)
            for reason in REASONS
        }

    def count(self, num_bytes: int, message: str) -> None:
        """Count a file of this size, for what DALI says of it."""
        self._counters[find_reason(num_bytes, message)].count()


def find_reason(num_bytes: int, message: str) -> str:
    """Return the reason that a file of this size is counted under."""
    if num_bytes == 0:
        return EMPTY
    if TOO_LITTLE_MEMORY in message:
        return MEMORY
    return FORMAT if "ormat not recognised" in message else DAMAGED
