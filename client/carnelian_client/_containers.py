"""Looks at whole files: the tags before them, a second file behind them, a WAV that was never closed or holds MP3."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CHUNK_ID = re.compile(rb"[ -~]{4}")
"""Matches the name of a RIFF chunk. Anything else ends the chunks: every eight zeros would pass for an empty chunk."""
_FLAC_START = re.compile(rb"fLaC[\0\x80]\0\0\x22")
"""Matches the beginning of a FLAC file with its first block of 34 bytes, too long to occur by chance in sound or in a
picture."""
_OGG_FLAGS = re.compile(rb"OggS\0([\0-\x07])")
"""Matches the beginning of an Ogg page; the group is its flags."""
MIDI_DUMP = b"\xf0\x7e"
"""The beginning of a MIDI sample dump. Of damaged ones, libsndfile (1.2.2) writes bytes to the standard output, where
others may read a program's results, and makes noise."""
_TAG_HEADER_BYTES = 10
_MPEG_FORMATS = (b"\x50\0", b"\x55\0")
"""The formats of a WAV file that are MPEG audio: layers I and II, and III."""


def end_of_tag(data: bytes) -> int:
    """Return where a file begins behind its ID3v2 tags, one or several; 0 if it has none."""
    start = 0
    while data[start : start + 3] == b"ID3":
        header = data[start : start + _TAG_HEADER_BYTES].ljust(_TAG_HEADER_BYTES, b"\0")
        size = sum(byte << shift for byte, shift in zip(header[6:], (21, 14, 7, 0), strict=True))
        has_footer = header[5] & 0x10
        start += _TAG_HEADER_BYTES + size + (_TAG_HEADER_BYTES if has_footer else 0)
    return start


def joined_format(data: bytes) -> str:
    """Return the format, WAV, FLAC or Ogg, of which a second file follows the first, or an empty string."""
    if data[:4] == b"RIFF":
        end = 8 + int.from_bytes(data[4:8], "little")
        return "WAV" if data[end : end + 4] == b"RIFF" else ""
    if data[:4] == b"fLaC" and _FLAC_START.search(data, 4):
        return "FLAC"
    # Flag 2 begins a stream. Parallel Ogg streams all begin before one continues.
    begins = [flags[0] & 2 for flags in _OGG_FLAGS.findall(data)] if data[:4] == b"OggS" else []
    return "Ogg" if begins != sorted(begins, reverse=True) else ""


def closed(data: bytes) -> bytes:
    """Fill in the size of a WAV file that was never closed; its writer left 0 there. Return other files unchanged."""
    for name, start, size in _chunks(data):
        if name == b"data":
            end = 8 + int.from_bytes(data[4:8], "little")
            if size or start < end <= len(data):  # closed without samples: what follows is no audio
                return data
            size = min(len(data) - start, 2**32 - 1)
            # A slice of the sound would be a second copy of it.
            return b"".join([data[: start - 4], size.to_bytes(4, "little"), memoryview(data)[start:]])
    return data


def is_wav_of_mpeg(head: bytes) -> bool:
    """Whether a file is a WAV that holds MPEG audio (MP3, or MP2 as broadcasters have it).

    DALI does not read it there, nor libsndfile layer II; of a variable bit rate, libsndfile reads only the beginning.

    Args:
        head: The beginning of the file, or all of it.
    """
    return any(name == b"fmt " and head[start : start + 2] in _MPEG_FORMATS for name, start, _ in _chunks(head))


def wav_content(data: bytes) -> bytes:
    """Return what the first `data` chunk of a WAV file holds; nothing if there is none."""
    return next((data[start : start + size] for name, start, size in _chunks(data) if name == b"data"), b"")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk of a RIFF file, where its content begins, and how many bytes its header claims."""
    start = 12
    while data[:4] == b"RIFF" and start + 8 <= len(data) and _CHUNK_ID.match(data, start):
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        yield data[start : start + 4], start + 8, size
        start += 8 + size + size % 2
