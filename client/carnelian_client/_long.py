"""Recordings of any length: cut in their pauses, transcribed piece by piece, and joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._audio import MAX_DECODED_BYTES, describe_audio, read_audio
from ._decoding import open_audio
from ._errors import CarnelianClientError, InvalidAudio, InvalidOption, about
from ._result import later, transcript_from_result
from ._threads import outside_main_thread
from ._types import Audio, DecodingOptions, Transcript

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import numpy.typing as npt

    from ._client import Outcome
    from ._decoding import Samples

DEFAULT_LONGEST_S = 30.0
"""The longest piece by default. Servers take twice as much, and half of the longest is left to find a pause in."""
LONGEST_RANGE_S = (5, 60)
"""What the longest piece may be: half of it has room for a pause at any rate, and servers take all of it."""
PIECE_ADVICE = "let pieces be shorter (`longest_piece_s`, `--longest-piece`)"
PAUSE_S = 0.3
"""The length of the stretches that are compared; a cut is in the middle of the quietest one. They are longer than the
closure of a plosive, which is quiet too."""
STRETCHES_A_PAUSE = 3
"""A stretch begins at each third of another, so that a pause lies whole in one."""


class Recording:
    """One recording: first give its `pieces` to a client, then the outcomes, in their order, to `add`."""

    def __init__(self, audio: Audio, options: DecodingOptions, longest_s: float = DEFAULT_LONGEST_S) -> None:
        """Describe it; nothing is read yet.

        Raises:
            InvalidOption: the options ask for alternatives, which belong to a piece.
            ValueError: `longest_s`, the longest piece, is not in `LONGEST_RANGE_S`.
        """
        check_longest_piece(longest_s)
        if "n_best" in options:
            raise InvalidOption(
                "`n_best` must be left out: alternatives are readings of a piece, and a recording has several pieces"
            )
        self._audio = audio
        self._longest_s = longest_s
        self._size_advice = PIECE_ADVICE if longest_s > LONGEST_RANGE_S[0] else ""
        self._cuts_s = [0.0]
        """Where the pieces begin and end."""
        self._transcripts: list[Transcript] = []

    def pieces(self) -> Iterator[bytes]:
        """Read the recording and cut it.

        Yields:
            Audio files that the server reads, one after the other, without a gap.

        Raises:
            InvalidAudio: it cannot be read, for soundfile is missing or it is damaged (pieces before the damage come);
                or has so many channels that a piece would need too much memory.
            OSError: the path cannot be read.
        """
        pieces = self._pieces()
        with about(describe_audio(self._audio)):
            try:
                while (piece := outside_main_thread(lambda: next(pieces, None))) is not None:
                    yield piece
            except ModuleNotFoundError as error:
                raise InvalidAudio(
                    "recordings are read here, for which soundfile must be installed (`pip install soundfile`)"
                ) from error

    def _pieces(self) -> Iterator[bytes]:
        num_frames = 0
        with open_audio(read_audio(self._audio)) as source:
            # A few KB of silence in Ogg can have hundreds of channels, and fill the memory.
            fitting_s = MAX_DECODED_BYTES / (4 * source.rate * source.channels)
            if fitting_s < LONGEST_RANGE_S[0]:
                raise InvalidAudio(
                    f"{LONGEST_RANGE_S[0]} s must have at most {MAX_DECODED_BYTES >> 20} MiB of samples, but "
                    f"{source.channels} channels at {source.rate} Hz have that in {fitting_s:.1f} s; mix them "
                    "down, or resample"
                )
            for piece in cut(source.blocks(), source.rate, min(self._longest_s, fitting_s)):
                num_frames += len(piece)
                self._cuts_s.append(num_frames / source.rate)
                yield source.encode([piece])

    def add(self, outcome: Outcome) -> None:
        """Keep the transcript of the next piece, or raise what it has in its place."""
        if isinstance(outcome, Transcript):
            self._transcripts.append(outcome)
            return
        if isinstance(outcome, CarnelianClientError):
            start_s, end_s = self._cuts_s[len(self._transcripts) :][:2]
            outcome.clip = f"{describe_audio(self._audio)}, from {start_s:.1f} to {end_s:.1f} s ({outcome.clip})"
            if outcome.size_advice:  # it is of whole clips
                outcome.size_advice = self._size_advice
        raise outcome

    def transcript(self) -> Transcript:
        """Join what was added to one transcript, whose times count from the recording's beginning."""
        first = self._transcripts[0]
        words = [
            word
            for start_s, transcript in zip(self._cuts_s[:-1], self._transcripts, strict=True)
            for word in later(transcript.raw, start_s)["words"]
        ]
        confidences = [word["confidence"] for word in words] or [each.confidence for each in self._transcripts]
        result = {
            **first.raw,
            "text": " ".join(filter(None, (transcript.text for transcript in self._transcripts))),
            "words": words,
            "confidence": round(sum(confidences) / len(confidences), 4),
            "duration": round(self._cuts_s[-2] + self._transcripts[-1].duration_s, 3),
            "alternatives": [],
            "rescored": any(transcript.rescored for transcript in self._transcripts),
        }
        return transcript_from_result(result, first.request_id)


def check_longest_piece(longest_s: float) -> None:
    """Refuse a longest piece that cannot be.

    Raises:
        ValueError: it is not in `LONGEST_RANGE_S`.
    """
    least_s, most_s = LONGEST_RANGE_S
    if not least_s <= longest_s <= most_s:
        raise ValueError(
            f"the longest piece (`longest_piece_s`) must have {least_s} to {most_s} s, but has {longest_s:g}."
        )


def cut(blocks: Iterator[Samples], rate: int, longest_s: float) -> Iterator[Samples]:
    """Cut samples, [frames, channels] in blocks of any length, into pieces of `longest_s` or down to half of that.

    The last piece is what is left, and may be shorter.

    Args:
        blocks: The samples, in order.
        rate: The sample rate in Hz.
        longest_s: The longest piece in seconds, in `LONGEST_RANGE_S`.
    """
    import numpy as np

    longest = int(longest_s * rate)
    held: list[Samples] = []
    length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        while length > longest:
            samples = np.concatenate(held)
            end = quietest_end(samples[:longest], rate)
            yield samples[:end]
            held, length = [samples[end:]], length - end
    if length:
        yield np.concatenate(held)


def quietest_end(samples: npt.NDArray[np.number[Any]], rate: int) -> int:
    """Find where the first piece of some samples, [frames] or [frames, channels], ends best.

    That is in the middle of the quietest 0.3 s (of the least variance) of their second half; of several, the last ones.
    """
    import numpy as np

    step = max(round(PAUSE_S * rate / STRETCHES_A_PAUSE), 1)
    shortest = len(samples) // 2
    num_steps = (len(samples) - shortest) // step
    allowed = samples[shortest:][: num_steps * step].reshape(num_steps, step, -1)
    with np.errstate(over="ignore", invalid="ignore"):  # the server refuses the piece
        loudness = np.convolve(allowed.var(axis=1).sum(axis=1), np.ones(STRETCHES_A_PAUSE), "valid")
    quietest = len(loudness) - 1 - int(loudness[::-1].argmin())
    return shortest + (2 * quietest + STRETCHES_A_PAUSE) * step // 2
