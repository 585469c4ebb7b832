"""Reads the headers of MPEG audio frames (layers II and III): where they begin, if they are counted, if more follow.

ISO/IEC 11172-3 and 13818-3; MPEG 2.5 is their extension to rates from 8 kHz.
"""

from __future__ import annotations

import io
import itertools
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_SYNC = re.compile(rb"\xff(?=[\xe2-\xe7\xf2-\xf7\xfa-\xfd])")
_KBIT_PER_S = {
    # (is MPEG 1, layer) -> by the four bits of the header; 0 and 15 are no rate
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES_HZ = (44_100, 48_000, 32_000)
"""The sample rates of MPEG 1; MPEG 2 has half of each, MPEG 2.5 a quarter."""
_LEAST_FRAME_BYTES = 24
"""The size of the smallest frame: 8 kbit/s at 24 kHz in layer III."""
_MOST_FRAME_BYTES = 1 << 12
"""More than twice the size of the largest frame."""
_LEAST_FRAMES = 3
"""Three headers, each where the one before it says, do not occur by chance in a picture or in silence."""
SHORT_BLOCK_FRAMES = 1152
"""Frames to read at once from a file that does not count them. Its end may be an error, which loses the last block."""
_TAG = b"ID3\3\0\0\0\0\0\x23" + bytes(35)
"""An ID3v2 tag, by which libsndfile recognises MPEG audio. Without one it first looks for a file of Mac OS beside it,
which in a working directory with a folder `.AppleDouble`, as AFP servers make it, is an error. It holds 35
bytes, for fewer than 2 do not help, and of fewer than 10 libmpg123 complains."""
_LEAST_LEFT_S = 0.5
"""Less MPEG audio than this after the counted frames is no second file: encoders count their delay differently."""


class Frame(NamedTuple):
    """The frame that a header describes."""

    num_bytes: int
    num_samples: int
    rate_hz: int


def read_frame(data: bytes, start: int) -> Frame | None:
    """The frame whose header is at `start`; None if that is no header, or one of free format."""
    if len(data) < start + 4 or data[start] != 0xFF or data[start + 1] < 0xE0:
        return None
    second, third = data[start + 1], data[start + 2]
    version, layer = second >> 3 & 3, 4 - (second >> 1 & 3)
    bit_rate, rate, padding = third >> 4, third >> 2 & 3, third >> 1 & 1
    if version == 1 or layer not in (2, 3) or bit_rate in (0, 15) or rate == 3:
        return None
    is_mpeg_1 = version == 3
    rate_hz = _RATES_HZ[rate] >> (0 if is_mpeg_1 else 1 if version == 2 else 2)
    num_samples = 576 if layer == 3 and not is_mpeg_1 else 1152
    bits = num_samples * 1000 * _KBIT_PER_S[is_mpeg_1, layer][bit_rate]
    return Frame(bits // (8 * rate_hz) + padding, num_samples, rate_hz)


def has_audio(data: bytes, enough_s: float) -> bool:
    """Whether there are so many seconds of frames, whatever else is before, between and behind them."""
    seconds, position = 0.0, 0
    while (sync := _SYNC.search(data, position)) is not None:
        frames = list(_frames(data, sync.start()))
        if len(frames) < _LEAST_FRAMES:
            position = sync.end()
            continue
        position = sync.start() + sum(frame.num_bytes for frame in frames)
        seconds += sum(frame.num_samples / frame.rate_hz for frame in frames)
        if seconds >= enough_s:
            return True
    return False


def from_first_frame(data: bytes) -> bytes:
    """Return MPEG audio without what is before its first whole frame, and what has no frames unchanged."""
    for sync in _SYNC.finditer(data):
        if len(list(itertools.islice(_frames(data, sync.start()), _LEAST_FRAMES))) == _LEAST_FRAMES:
            return data[sync.start() :]
    return data


def _frames(data: bytes, start: int) -> Iterator[Frame]:
    """Yield the frames of one rate that follow each other from `start` on."""
    first = frame = read_frame(data, start)
    while first is not None and frame is not None and frame.rate_hz == first.rate_hz:
        yield frame
        start += frame.num_bytes
        frame = read_frame(data, start)


def counts_no_frames(data: bytes) -> bool:
    """Return whether bytes, without tags, may be an MP3 file that does not say how long it is, as one from a pipe."""
    head = data[:200]
    if head[:1] != b"\xff" or b"VBRI" in head:
        return False
    place = max(head.find(b"Xing"), head.find(b"Info"))
    has_count, count = struct.unpack_from(">II", head.ljust(place + 12), place + 4)
    return place < 0 or not (has_count & 1 and count)


def is_taken_for_mpeg(data: bytes) -> bool:
    """Whether libsndfile would find MPEG frames in what has none, such as raw samples of which the first is -1.

    Frames of one file begin with the same two bytes, and have the rate in common. Nobody writes layer I, as which
    libsndfile takes -1, and the mark before UTF-16.
    """
    if len(data) < 3 or data[0] != 0xFF or data[1] < 0xE0:
        return False
    is_layer_1 = data[1] & 0x06 == 0x06
    head = data[:_MOST_FRAME_BYTES]
    nexts = range(_LEAST_FRAME_BYTES, len(head) - 2)
    return is_layer_1 or not any(head.startswith(data[:2], i) and not (head[i + 2] ^ data[2]) & 0x0C for i in nexts)


class Tagged(io.BufferedIOBase):
    """MPEG audio behind a tag, by which libsndfile recognises it. The file, which may last hours, is not copied."""

    def __init__(self, file: BinaryIO) -> None:
        """Take an open file without a tag, at its beginning."""
        self._file = file
        self._place = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        if whence == io.SEEK_END:
            offset += len(_TAG) + self._file.seek(0, io.SEEK_END)
        elif whence == io.SEEK_CUR:
            offset += self._place
        self._place = offset
        self._file.seek(max(offset - len(_TAG), 0))
        return offset

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, or to the end."""
        data = _TAG[self._place :]
        if size is None or size < 0:
            data += self._file.read()
        else:
            data = data[:size]
            data += self._file.read(size - len(data))
        self._place += len(data)
        return data


class Uncounted(Tagged):
    """MPEG audio that claims to be far larger than it is.

    Of an MP3 without a count of frames, libsndfile reads as many as fit into the file's size at the first frame's bit
    rate. If the bit rate varies, it stops long before the end.
    """

    _is_at_end = False

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; remember if that is the end, where libsndfile asks for the size."""
        self._is_at_end = whence == io.SEEK_END
        return super().seek(offset, whence)

    def tell(self) -> int:
        """Return the place; at the end, one that is far behind it."""
        return super().tell() + (self._is_at_end << 40)


class InMemory(io.BytesIO):
    """A file in memory. Of damaged ones, libsndfile seeks places before the beginning; a refusal would be printed."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place, at least to the beginning."""
        return super().seek(max(offset, 0) if whence == io.SEEK_SET else offset, whence)


def in_memory(data: bytes) -> io.BufferedIOBase:
    """Return a file in memory for libsndfile to read to its end, of bytes without tags before them."""
    file = InMemory(data)
    if data[:1] != b"\xff":
        return file
    return Uncounted(file) if counts_no_frames(data) else Tagged(file)


def goes_on(file: io.BufferedIOBase) -> bool:
    """Return whether there is more MPEG audio after the frames that were read."""
    return has_audio(file.read(), _LEAST_LEFT_S)
