"""Makes the bytes of one audio file that the server reads from what a caller has: a path, bytes or samples.

WAV, FLAC and Ogg go as they are. What only this side can read (AIFF, MP3, MP3 and MP2 in a WAV file, FLAC from a pipe,
Ogg with a picture, ...) is decoded and sent without loss. Samples become a WAV file. Nothing is resampled or mixed down
here: the server has the one definition of that.
"""

from __future__ import annotations

import contextlib
import errno
import io
import numbers
import operator
import os
import re
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from ._containers import closed, end_of_tag, is_wav_of_mpeg, joined_format, wav_content
from ._decoding import open_audio
from ._errors import CUT_ADVICE, FORMAT_ADVICE, InvalidAudio
from ._mpeg import from_first_frame
from ._threads import outside_main_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from ._decoding import Samples
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

_WAVE_PCM, _WAVE_FLOAT = 1, 3
_OGG_PAGE = re.compile(rb"OggS.{8}(..)(.{4})", re.DOTALL)
"""Matches an Ogg page; the groups are the upper two bytes of its count of samples, and the number of its stream."""
NARROW_OPUS_HZ = 12_000
"""The highest rate of Opus that is decoded here. The server takes it by way of 32 kHz; as the upper bands of its
features are all but empty, its transcripts are then not those of the decoded samples."""


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
        DeadlineExceeded: it was not read in time.
        TypeError: `audio` is none of the forms of `Audio`.
    """
    data = read_audio(audio, deadline)
    served = data
    if not _is_served_container(data):
        served = _transcode(data, deadline)
    elif _is_narrow_opus(data):
        # Without soundfile, or where a page is lost, the server does what it can.
        with contextlib.suppress(InvalidAudio):
            served = _transcode(data, deadline)
    deadline.check()
    return served


def read_audio(audio: Audio, deadline: Deadline | None = None) -> bytes:
    """Make the bytes of one audio file, in any format and without tags before it or a WAV around MP3, from a clip.

    Raises what :func:`encode_audio` raises, but for the format.
    """
    if isinstance(audio, (str, os.PathLike)):
        data = _read(audio, deadline)
    elif isinstance(audio, (bytes, bytearray, memoryview)):
        data = bytes(audio)
    elif isinstance(audio, tuple) and len(audio) == 2:
        data = wav_from_samples(*audio)
    else:
        advice = ""
        if hasattr(audio, "read"):
            advice = "; pass the bytes that its `read()` gives"
        elif hasattr(audio, "tobytes"):
            advice = "; pass samples with their rate, or a file's bytes, which its `tobytes()` gives"
        raise TypeError(
            "`audio` must be a path, the bytes of an audio file, or a tuple `(samples, rate)`, "
            f"but is {type(audio).__name__}{advice}."
        )
    if not data:
        raise InvalidAudio("empty audio: there is not a single byte")
    _check_size(len(data))
    # The server refuses ID3v2 tags. With one, libsndfile drops bytes at the end of WAV, and does not recognise Ogg.
    data = data[end_of_tag(data) :]
    if kind := joined_format(data):
        raise InvalidAudio(
            f"it holds {kind} files one behind the other, of which only the first would be read; send each by itself"
        )
    data = closed(data)
    if is_wav_of_mpeg(data) and not (data := from_first_frame(wav_content(data))):
        raise InvalidAudio("no samples")
    return data


def _read(path: str | os.PathLike[str], deadline: Deadline | None) -> bytes:
    try:
        # Not by `Path`, which takes "" for a folder, and removes a slash from a URL.
        with open(path, "rb") as file:  # noqa: PTH123
            _check_size(os.fstat(file.fileno()).st_size)  # before it fills the memory
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


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise InvalidAudio(
            f"audio must have at most {MAX_BYTES} bytes, but has {size}",
            size_advice="convert it to FLAC, or cut it into parts",
        )


def wav_from_samples(samples: npt.ArrayLike, rate: int) -> bytes:
    """Write samples as a WAV file: integers as PCM, floating point as float32.

    Args:
        samples: [samples] or [samples, channels], of one of the types of `Audio`.
        rate: Samples per second and channel.

    Raises:
        InvalidAudio: no samples, or `check_samples` or `check_rate` refuses them.
    """
    rate = check_rate(rate)
    array = check_samples(samples)
    if array.size == 0:
        raise InvalidAudio("no samples")
    return _wav(array, rate, _WAVE_FLOAT if array.dtype.kind == "f" else _WAVE_PCM)


def check_rate(rate: int, least_hz: int = 1) -> int:
    """Return a sample rate as an int.

    Raises:
        InvalidAudio: it is no rate that a clip can have, or below the least one.
    """
    try:
        whole = int(rate) if isinstance(rate, numbers.Real) and rate % 1 == 0 else operator.index(rate)
    except TypeError:  # some libraries give the rate first
        whole = None
    if whole is None or isinstance(rate, bool):
        raise InvalidAudio(f"a clip must be `(samples, rate)`, the rate a whole number of Hz, but that is {rate!r:.40}")
    if not least_hz <= whole <= MAX_RATE_HZ:
        raise InvalidAudio(f"`rate` must be at least {least_hz} Hz and at most {MAX_RATE_HZ}, but is {whole}")
    return whole


def _are_bytes(samples: Any) -> bool:
    """Whether samples are no array but a buffer of bytes, each of which NumPy would take for a sample of 8 bits."""
    try:
        return not hasattr(samples, "dtype") and memoryview(samples).itemsize == 1
    except (TypeError, ValueError, BufferError):  # no buffer, or one that gives no view
        return False


def check_samples(samples: npt.ArrayLike) -> npt.NDArray[np.number[Any]]:
    """Return samples as an array of little-endian float32, int16, int32 or uint8.

    Raises:
        InvalidAudio: NaN, infinity or floats far beyond 1, a shape or a sample type that is no clip's, bytes, or what
            NumPy makes no array of.
    """
    import numpy as np

    if _are_bytes(samples):
        raise InvalidAudio(
            "samples must be an array, but are bytes; make one by `numpy.frombuffer(data, '<i2')`, or 'u1' if they "
            "have 8 bits"
        )
    try:
        array = np.asarray(samples)
    except Exception as error:  # for example, of a tensor on a GPU; its class may be any
        raise InvalidAudio(f"samples must be a NumPy array, or become one, but: {error}") from error
    if array.ndim not in (1, 2) or (array.ndim == 2 and not 1 <= array.shape[1] <= MAX_CHANNELS):
        raise InvalidAudio(
            f"samples must be [samples] or [samples, channels] with up to {MAX_CHANNELS} channels, "
            f"but have shape {list(array.shape)}; transpose them if channels come first"
        )
    if np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):  # what overflows is refused below
            array = array.astype("<f4", copy=False)
        if not np.isfinite(array).all():
            raise InvalidAudio("samples are not finite: there is a NaN or an infinity among them")
        if array.size and (peak := max(array.max(), -array.min())) > MAX_PEAK:
            raise InvalidAudio(
                f"samples of floating point must be in [-1, 1], but reach {peak:g}; divide those of 16 bits by 32768"
            )
        return array
    if (kind := array.dtype.str[1:]) in ("u1", "i2", "i4"):  # in either byte order
        return array.astype(f"<{kind}", copy=False)
    raise InvalidAudio(
        f"samples must be floating point in [-1, 1], int16, int32 or uint8, but are {array.dtype}; convert them"
    )


def _wav(array: npt.NDArray[np.number[Any]], rate: int, form: int) -> bytes:
    """Put a WAV header before [samples] or [samples, channels] of little-endian numbers."""
    channels = 1 if array.ndim == 1 else array.shape[1]
    width = array.itemsize
    _check_size(array.nbytes)  # before the copy, and before the header overflows
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


def _is_narrow_opus(data: bytes) -> bool:
    """Whether a file is Ogg Opus of up to `NARROW_OPUS_HZ`, or of rate 0, unknown, which the server takes for 8 kHz."""
    return data[28:36] == b"OpusHead" and int.from_bytes(data[40:44], "little") <= NARROW_OPUS_HZ


def _transcode(data: bytes, deadline: Deadline) -> bytes:
    """Decode and encode without loss, block by block."""

    def bounded(blocks: Iterator[Samples]) -> Iterator[Samples]:
        num_bytes = 0
        for block in blocks:
            deadline.check()
            num_bytes += block.nbytes
            if num_bytes > MAX_DECODED_BYTES:
                raise InvalidAudio(
                    f"a clip that is decoded here must have at most {MAX_DECODED_BYTES >> 20} MiB of samples, but has "
                    "more",
                    size_advice=CUT_ADVICE,
                )
            yield block

    def transcode() -> bytes:
        with open_audio(data) as source:
            return source.encode(bounded(source.blocks()))

    try:
        return outside_main_thread(transcode)
    except ModuleNotFoundError:
        raise InvalidAudio(f"the format is not one of the server's; {FORMAT_ADVICE}") from None
