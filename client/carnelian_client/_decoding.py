"""Decodes audio files on this side, block by block, through libsndfile; and encodes samples without loss."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from ._containers import MIDI_DUMP
from ._errors import CONVERT_ADVICE, InvalidAudio
from ._mpeg import SHORT_BLOCK_FRAMES, Uncounted, goes_on, in_memory, is_taken_for_mpeg

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import soundfile

Samples: TypeAlias = "npt.NDArray[np.float32]"
"""[frames, channels], in [-1, 1]; files of floats and MP3 may exceed it."""

BLOCK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = 2**63 - 1
"""What libsndfile says of a file whose header does not count its frames."""
_OGG_ROUNDING_S = 0.1
"""What times rounded to milliseconds may cost; a lost page mostly costs more."""

_FLAC_SUBTYPES = {
    "PCM_S8": "PCM_16",
    "PCM_U8": "PCM_16",
    "PCM_16": "PCM_16",
    "ULAW": "PCM_16",
    "ALAW": "PCM_16",
    "PCM_24": "PCM_24",
}
"""libsndfile subtype of the source -> FLAC subtype that keeps every bit. Others (floats, 32 bits, and MP3, which
decodes to floats, also beyond 1) become float WAV."""
_FLAC_MAX_CHANNELS = 8
_FLAC_MAX_ANY_RATE_HZ = 2**16 - 1
_FLAC_MAX_RATE_HZ = 10 * _FLAC_MAX_ANY_RATE_HZ
"""A higher rate than the one above is written in tens of Hz."""


@contextlib.contextmanager
def open_audio(data: bytes) -> Iterator[AudioFile]:
    """Open the bytes of an audio file in any format that libsndfile reads well, without tags before it.

    Raises:
        InvalidAudio: libsndfile cannot read the file, now or while the context lasts.
        ModuleNotFoundError: soundfile is not installed.
    """
    import soundfile

    if data.startswith(MIDI_DUMP):
        raise InvalidAudio(f"a MIDI sample dump is not read; {CONVERT_ADVICE}")
    if is_taken_for_mpeg(data):
        raise InvalidAudio(
            "it begins as an MP3 file does, but no second frame follows; send samples without a header as "
            "`(samples, rate)`, or as a file, for example from `ffmpeg -f s16le -ar 16000 -i clip.raw clip.flac`"
        )
    try:
        file = in_memory(data)
        with soundfile.SoundFile(file) as source:
            yield AudioFile(source, file)
    except soundfile.LibsndfileError as error:
        raise InvalidAudio(f"libsndfile cannot decode it ({error.error_string}); {CONVERT_ADVICE}") from error


class AudioFile:
    """An audio file that is open."""

    def __init__(self, source: soundfile.SoundFile, file: io.BufferedIOBase) -> None:
        """Take an open file, and the bytes that it reads."""
        # Otherwise soundfile seeks after each read, and the next MP3 frame lacks bits that it shares with the last.
        source.seekable = lambda: False
        self.rate: int = source.samplerate
        """Sample rate in Hz."""
        self.channels: int = source.channels
        self._source = source
        self._file = file

    def blocks(self) -> Iterator[Samples]:
        """Read the file to its end; an MP3 without a count of frames may end in half a frame, or in a tag.

        Raises:
            InvalidAudio: the file has no samples, or another one follows it; or it is FLAC or Ogg and counts more.
        """
        import soundfile

        is_uncounted = isinstance(self._file, Uncounted)
        # libsndfile takes a tag behind the last frame of FLAC for damage, and leaves damaged pages of Ogg out.
        is_counted = self._source.format in ("FLAC", "OGG") and self._source.frames < _UNKNOWN_FRAMES
        left = self._source.frames if is_counted else sys.maxsize
        num_blocks = 0
        # Not by `source.blocks()`, which repeats its last block if a header claims more than there is.
        while left:
            size = min(SHORT_BLOCK_FRAMES if is_uncounted else BLOCK_FRAMES, left)
            try:
                block = self._source.read(size, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError:
                if not is_uncounted or not num_blocks or goes_on(self._file):
                    raise
                return
            if not len(block):
                break
            yield block
            left -= len(block)
            num_blocks += 1
        # Not what rounded times cost, as of Ogg that ffmpeg copied out of WebM.
        if is_counted and left > (self.rate * _OGG_ROUNDING_S if self._source.format == "OGG" else 0):
            raise InvalidAudio(
                f"it must have the {self._source.frames} samples that it counts, but {left} are missing: the file is "
                f"damaged, cut short, or was recorded with gaps; {CONVERT_ADVICE}"
            )
        if self._source.format == "MP3" and goes_on(self._file):
            raise InvalidAudio(
                "it goes on behind its end, as MP3 files do that were put one behind the other, or are damaged within; "
                f"{CONVERT_ADVICE}"
            )
        if not num_blocks:
            raise InvalidAudio(f"no samples, or none that its header counts; {CONVERT_ADVICE}")

    def encode(self, blocks: Iterable[Samples]) -> bytes:
        """Make the bytes of a file with these samples of the open one, as FLAC, or as float WAV if that loses bits."""
        import soundfile

        source = self._source
        flac = _FLAC_SUBTYPES.get(source.subtype)
        form: dict[str, Any] = {"format": "WAV", "subtype": "FLOAT"}
        has_rate = self.rate <= _FLAC_MAX_ANY_RATE_HZ or (self.rate % 10 == 0 and self.rate <= _FLAC_MAX_RATE_HZ)
        if flac and has_rate and self.channels <= _FLAC_MAX_CHANNELS:
            form = {"format": "FLAC", "subtype": flac}
        sink = io.BytesIO()
        # libsndfile scales floats to integers by the full range and back, so 24 bits survive float32.
        with soundfile.SoundFile(sink, "w", self.rate, self.channels, **form) as target:
            for block in blocks:
                target.write(block)
        return sink.getvalue()
