"""Metrics that Triton cannot count by itself: seconds of audio, clips by outcome, frames with and without padding.

They appear beside Triton's own metrics, labelled with the model's public name. Nothing of a clip's content is in them.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

HELP = {
    "carnelian_audio_seconds_total": "Audio that got a transcript, in seconds of whole frames",
    "carnelian_frames_total": "Frames of log-probabilities that belong to a clip",
    "carnelian_delivered_frames_total": "The same, with padding to the longest clip of the batch that is decoded",
    "carnelian_clips_total": "Clips by outcome",
}
INTERVAL_S = 0.05
"""The least time between two updates of a counter, in seconds. An update is a round trip to the server; answers do not
wait for it."""
OK = "ok"
OTHER = "other"
# The first words of an error -> the outcome that its clip is counted under. Labels must stay few.
OUTCOMES = {
    "no samples": "no_samples",
    "too short": "too_short",
    "too long": "too_long",
    "not finite": "not_finite",
    "wrong option": "wrong_option",
}


class Metrics:
    """Counters of one model; several instances of it share them."""

    def __init__(self, model: str) -> None:
        """Register the counters; there are none where the server runs with --allow-metrics=false."""
        self._metrics: dict[str, Any] = {}
        # A family must outlive its metrics.
        self._families: list[Any] = []
        self._pending: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._counted = threading.Event()
        self._is_open = True
        self._thread = threading.Thread(target=self._send, daemon=True)
        try:
            seconds, frames, delivered, clips = self._families = [
                pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.COUNTER)
                for name, text in HELP.items()
            ]
        except pb_utils.TritonModelException:
            return
        for name, family in (("seconds", seconds), ("frames", frames), ("delivered", delivered)):
            self._metrics[name] = family.Metric(labels={"model": model})
        for outcome in (OK, *OUTCOMES.values(), OTHER):
            self._metrics[outcome] = clips.Metric(labels={"model": model, "outcome": outcome})
        self._thread.start()

    def count(
        self,
        results: Iterable[dict[str, Any]],
        scores: Sequence[npt.NDArray[np.float32]],
        lengths: Sequence[npt.NDArray[np.int32]],
    ) -> None:
        """Count a batch. The server learns of it a moment later.

        Args:
            results: RESULT of each clip.
            scores: LOG_PROBS of each request, [rows, frames, labels + 1].
            lengths: LOG_PROB_LENGTH of each request, [rows], in frames.
        """
        if not self._metrics:
            return
        values: Counter[str] = Counter()
        for result in results:
            values[_outcome(result)] += 1
            values["seconds"] += result.get("duration", 0)
        for rows, row_lengths in zip(scores, lengths, strict=True):
            values["frames"] += sum(min(max(length, 0), rows.shape[1]) for length in row_lengths.tolist())
            values["delivered"] += rows.shape[0] * rows.shape[1]
        with self._lock:
            self._pending.update(values)
        self._counted.set()

    def close(self) -> None:
        """Send the counts that are not sent yet, and end the thread."""
        self._is_open = False
        self._counted.set()
        if self._thread.is_alive():
            self._thread.join()

    def _send(self) -> None:
        is_open = True
        while is_open:
            self._counted.wait()
            self._counted.clear()
            is_open = self._is_open
            if is_open:
                time.sleep(INTERVAL_S)
            with self._lock:
                values, self._pending = self._pending, Counter()
            for name, value in values.items():
                if value > 0:
                    self._metrics[name].increment(value)


def _outcome(result: dict[str, Any]) -> str:
    if "error" not in result:
        return OK
    return next((label for words, label in OUTCOMES.items() if result["error"].startswith(words)), OTHER)
