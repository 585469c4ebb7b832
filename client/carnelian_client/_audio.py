"""Makes the bytes of one audio file that the server reads from what a caller has: a path, bytes or samples.

WAV, FLAC and Ogg go as they are. What only this side can read (AIFF, MP3, FLAC from a pipe, Ogg with a picture, ...
through libsndfile) is sent as FLAC, or as a float WAV where FLAC would lose bits. Samples become a WAV file. Nothing is
resampled or mixed down here: the server has the one definition of that.
"""

from __future__ import annotations

import errno
import io
import numbers
import operator
import os
import re
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from ._containers import closed, end_of_tag, joined_format
from ._errors import CONVERT_ADVICE, FORMAT_ADVICE, InvalidAudio
from ._mpeg import counts_no_frames, has_audio, is_taken_for_mpeg

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt
    import soundfile

    from ._retry import Deadline
    from ._types import Audio

MAX_BYTES = 2**31 - 2**16
"""Triton takes messages of up to 2 GiB less one byte; all else in a request needs far less than 64 KiB."""
MAX_DECODED_BYTES = 2**28
"""Of a file that is decoded here, as float32: 25 minutes at 44.1 kHz. Each thread of `transcribe_many` holds one."""
MAX_CHANNELS = 64
"""The most channels; an array with more has its samples in the wrong axis."""
MAX_PEAK = 32.0
"""The largest float sample: beyond are integers that nobody scaled, which are transcribed badly. Loud clips may exceed
1 a little."""
MAX_RATE_HZ = 2**24 - 1
"""The highest sample rate: a WAV header counts bytes a second in 32 bits, here of as many channels of four bytes."""
BLOCK_FRAMES = 1 << 16
_SHORT_BLOCK_FRAMES = 1152
"""Frames to read at once from an MP3 that does not count them. Its end may be an error, which loses the last block."""
_LEAST_LEFT_S = 0.5
"""Less MPEG audio than this after the counted frames is no second file: encoders count their delay differently."""

_WAVE_PCM, _WAVE_FLOAT = 1, 3
_OGG_PAGE = re.compile(rb"OggS.{8}(..)(.{4})", re.DOTALL)
"""Matches an Ogg page; the groups are the upper two bytes of its count of samples, and the number of its stream."""
_FLAC_SUBTYPES = {
    "PCM_S8": "PCM_16",
    "PCM_U8": "PCM_16",
    "PCM_16": "PCM_16",
    "ULAW": "PCM_16",
    "ALAW": "PCM_16",
    "PCM_24": "PCM_24",
}
"""libsndfile subtype of the source -> FLAC subtype that keeps every bit. Others (floats, 32 bits, and MP3, which
decodes to floats, also beyond 1) are sent as float WAV."""
_FLAC_MAX_CHANNELS = 8
_FLAC_MAX_ANY_RATE_HZ = 2**16 - 1
_FLAC_MAX_RATE_HZ = 10 * _FLAC_MAX_ANY_RATE_HZ
"""A higher rate than the one above is written in tens of Hz."""


def describe_audio(audio: Audio) -> str:
    """Name a clip for error messages."""
    if isinstance(audio, (str, os.PathLike)):
        return os.fspath(audio)
    if isinstance(audio, (bytes, bytearray, memoryview)):
        return f"{memoryview(audio).nbytes} bytes"
    if isinstance(audio, tuple) and len(audio) == 2:
        rate = f" at {audio[1]} Hz" if isinstance(audio[1], numbers.Real) else ""
        return f"samples of shape {getattr(audio[0], 'shape', '?')}{rate}"
    return type(audio).__name__


def encode_audio(audio: Audio, deadline: Deadline) -> bytes:
    """Make the bytes of one WAV, FLAC or Ogg file from a clip.

    Raises:
        InvalidAudio: the clip is empty, not finite, too large, or in a format that neither side reads; or its samples
            or their rate are none.
        OSError: the path cannot be read.
        DeadlinePassed: before it was read.
        TypeError: `audio` is none of the forms of `Audio`.
    """
    if isinstance(audio, (str, os.PathLike)):
        data = _read(audio, deadline)
    elif isinstance(audio, (bytes, bytearray, memoryview)):
        data = bytes(audio)
    elif isinstance(audio, tuple) and len(audio) == 2:
        data = wav_from_samples(*audio)
    else:
        raise TypeError(
            "`audio` must be a path, the bytes of an audio file, or a tuple `(samples, rate)`, "
            f"but is {type(audio).__name__}."
        )
    if not data:
        raise InvalidAudio("empty audio: there is not a single byte", clip=describe_audio(audio))
    _check_size(len(data), describe_audio(audio))
    # The server refuses ID3v2 tags. With one, libsndfile drops bytes at the end of WAV, and does not recognise Ogg.
    data = data[end_of_tag(data) :]
    if kind := joined_format(data):
        raise InvalidAudio(
            f"it holds {kind} files one behind the other, of which only the first would be read; send each by itself",
            clip=describe_audio(audio),
        )
    served = closed(data) if _is_served_container(data) else _transcode(data, describe_audio(audio), deadline)
    deadline.check()
    return served


def _read(path: str | os.PathLike[str], deadline: Deadline) -> bytes:
    try:
        # Not by `Path`, which takes "" for a folder, and removes a slash from a URL.
        with open(path, "rb") as file:  # noqa: PTH123
            _check_size(os.fstat(file.fileno()).st_size, describe_audio(path))  # before it fills the memory
            return read_all(file, deadline)
    except ValueError as error:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"a path must be a name that a file can have ({error})", str(path)) from error


def read_all(file: BinaryIO, deadline: Deadline | None = None) -> bytes:
    """Read an open file to its end, or until it is too large for a request: devices and pipes may have no end."""
    data = io.BytesIO()
    while data.tell() <= MAX_BYTES and (block := file.read(1 << 20)):
        data.write(block)
        if deadline is not None:
            deadline.check()
    return data.getvalue()


def _check_size(size: int, clip: str) -> None:
    if size > MAX_BYTES:
        raise InvalidAudio(
            f"a request must be smaller than {MAX_BYTES} bytes, but has {size}; send shorter clips", clip=clip
        )


def wav_from_samples(samples: npt.ArrayLike, rate: int) -> bytes:
    """Write samples as a WAV file: integers as PCM, floating point as float32.

    Args:
        samples: [samples] or [samples, channels], of one of the types of `Audio`.
        rate: Samples per second and channel.

    Raises:
        InvalidAudio: no samples, NaN, infinity or floats far beyond 1, a shape, a sample type or a rate that is no
            clip's, or what NumPy makes no array of.
    """
    import numpy as np

    try:
        array = np.asarray(samples)
    except Exception as error:  # for example, of a tensor on a GPU; its class may be any
        raise InvalidAudio(f"samples must be a NumPy array, or become one, but: {error}") from error
    clip = describe_audio((array, rate))
    try:
        rate = int(rate) if isinstance(rate, numbers.Real) and rate % 1 == 0 else operator.index(rate)
    except TypeError:  # some libraries give the rate first
        raise InvalidAudio(
            f"a clip must be `(samples, rate)`, the rate a whole number of Hz, but that is {rate!r:.40}", clip=clip
        ) from None
    if not 1 <= rate <= MAX_RATE_HZ:
        raise InvalidAudio(f"`rate` must be at least 1 Hz and at most {MAX_RATE_HZ}, but is {rate}", clip=clip)
    if array.ndim not in (1, 2) or (array.ndim == 2 and not 1 <= array.shape[1] <= MAX_CHANNELS):
        raise InvalidAudio(
            f"samples must be [samples] or [samples, channels] with up to {MAX_CHANNELS} channels, "
            f"but have shape {list(array.shape)}; transpose them if channels come first",
            clip=clip,
        )
    if array.size == 0:
        raise InvalidAudio("no samples", clip=clip)
    if np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):  # what overflows is refused below
            array = array.astype("<f4", copy=False)
        if not np.isfinite(array).all():
            raise InvalidAudio("samples are not finite: there is a NaN or an infinity among them", clip=clip)
        if (peak := max(array.max(), -array.min())) > MAX_PEAK:
            raise InvalidAudio(
                f"samples of floating point must be in [-1, 1], but reach {peak:g}; divide those of 16 bits by 32768",
                clip=clip,
            )
        return _wav(array, rate, _WAVE_FLOAT)
    if (kind := array.dtype.str[1:]) in ("u1", "i2", "i4"):  # in either byte order
        return _wav(array.astype(f"<{kind}", copy=False), rate, _WAVE_PCM)
    raise InvalidAudio(
        f"samples must be floating point in [-1, 1], int16, int32 or uint8, but are {array.dtype}; convert them",
        clip=clip,
    )


def _wav(array: npt.NDArray[np.number[Any]], rate: int, form: int) -> bytes:
    """Put a WAV header before [samples] or [samples, channels] of little-endian numbers."""
    channels = 1 if array.ndim == 1 else array.shape[1]
    width = array.itemsize
    _check_size(array.nbytes, describe_audio((array, rate)))  # before the copy, and before the header overflows
    data = array.tobytes()
    frame = channels * width
    fmt = struct.pack("<HHIIHH", form, channels, rate, rate * frame, frame, 8 * width)
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt
    if form != _WAVE_PCM:  # without PCM samples, the format requires the number of frames
        chunks += b"fact" + struct.pack("<II", 4, len(array))
    chunks += b"data" + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _is_served_container(data: bytes) -> bool:
    if data[:4] == b"fLaC":  # one from a pipe has no count of samples (36 bits), which the server needs
        return int.from_bytes(data[21:26], "big") % 2**36 > 0
    if data[:4] == b"OggS":  # the server needs pages of one stream, each with a count of samples below 2^48
        return set(_OGG_PAGE.findall(data)) == {(b"\0\0", data[14:18])}
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


class _Unmeasured(io.BytesIO):
    """A file in memory that claims to be far larger than it is.

    libsndfile reads no more frames of an MP3 file without a count than fit into its size at the first one's bit rate.
    Where that varies it stops long before the end.
    """

    _is_at_end = False

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._is_at_end = whence == io.SEEK_END
        return super().seek(offset, whence)

    def tell(self) -> int:
        return super().tell() + (self._is_at_end << 40)


def _goes_on(file: io.BytesIO) -> bool:
    """Return whether there is more MPEG audio after the frames that were read."""
    return has_audio(file.getvalue(), io.BytesIO.tell(file), _LEAST_LEFT_S)


def _transcode(data: bytes, clip: str, deadline: Deadline) -> bytes:
    """Decode and encode without loss, block by block."""
    try:
        import soundfile
    except ModuleNotFoundError:
        raise InvalidAudio(f"the format is not one of the server's; {FORMAT_ADVICE}", clip=clip) from None
    if is_taken_for_mpeg(data):
        raise InvalidAudio(
            "it begins as an MP3 file does, but no second frame follows; send samples without a header as "
            "`(samples, rate)`, or as a file, for example from `ffmpeg -f s16le -ar 16000 -i clip.raw clip.flac`",
            clip=clip,
        )
    file = _Unmeasured(data) if counts_no_frames(data) else io.BytesIO(data)
    sink = io.BytesIO()
    num_bytes = 0
    try:
        with soundfile.SoundFile(file) as source:
            # Otherwise soundfile seeks after each read, and the next MP3 frame lacks bits that it shares with the last.
            source.seekable = lambda: False
            flac = _FLAC_SUBTYPES.get(source.subtype)
            form: dict[str, Any] = {"format": "WAV", "subtype": "FLOAT"}
            rate = source.samplerate
            has_rate = rate <= _FLAC_MAX_ANY_RATE_HZ or (rate % 10 == 0 and rate <= _FLAC_MAX_RATE_HZ)
            if flac and has_rate and source.channels <= _FLAC_MAX_CHANNELS:
                form = {"format": "FLAC", "subtype": flac}
            # libsndfile scales floats to integers by the full range and back, so 24 bits survive float32.
            with soundfile.SoundFile(sink, "w", rate, source.channels, **form) as target:
                for block in _read_blocks(source, file):
                    target.write(block)
                    deadline.check()
                    num_bytes += block.nbytes
                    if num_bytes > MAX_DECODED_BYTES:
                        raise InvalidAudio(
                            f"a clip that is decoded here must have at most {MAX_DECODED_BYTES >> 20} MiB of samples, "
                            "but has more; cut it, for example with "
                            "`ffmpeg -i talk.mp3 -f segment -segment_time 50 talk-%03d.wav`",
                            clip=clip,
                        )
    except soundfile.LibsndfileError as error:
        raise InvalidAudio(
            f"neither the server nor libsndfile can decode it ({error.error_string}); {CONVERT_ADVICE}",
            clip=clip,
        ) from error
    if num_bytes == 0:
        raise InvalidAudio(f"no samples, or none that its header counts; {CONVERT_ADVICE}", clip=clip)
    return sink.getvalue()


def _read_blocks(source: soundfile.SoundFile, file: io.BytesIO) -> Iterator[npt.NDArray[np.float32]]:
    """Read an open file to its end; an MP3 without a count of frames may end in half a frame, or in a tag."""
    import soundfile

    size = _SHORT_BLOCK_FRAMES if isinstance(file, _Unmeasured) else BLOCK_FRAMES
    num_blocks = 0
    # Not by `source.blocks()`, which repeats its last block if a header claims more than there is.
    while True:
        try:
            block = source.read(size, dtype="float32")
        except soundfile.LibsndfileError:
            if isinstance(file, _Unmeasured) and num_blocks and not _goes_on(file):
                return
            raise
        if not len(block):
            if source.format == "MP3" and _goes_on(file):
                raise InvalidAudio(
                    "it goes on behind its end, as MP3 files that were put one behind the other do; " + CONVERT_ADVICE
                )
            return
        yield block
        num_blocks += 1
