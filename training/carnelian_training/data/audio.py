"""Reading a clip as an encoded sound file, and the DALI operators that decode it."""

import io
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as graph_math
from nvidia.dali.pipeline import DataNode

from carnelian_training.data.manifest import Clip
from carnelian_training.features import SAMPLE_RATE_HZ

Encoded = npt.NDArray[np.uint8]
RINGING = 160
"""The number of samples, 10 ms, at either end of a clip where a resampled constant offset causes ringing."""
_AT_ONCE = 1 << 16  # frames decoded at once
_ADVICE = "write it anew, for example with `ffmpeg -i IN OUT.flac`"


def encoded(clip: Clip) -> Encoded:
    """Return the bytes of a sound file that holds exactly the clip.

    A clip with an `offset` is cut out of its file as a WAV file in memory, at the file's own rate, so that a segment of
    a long recording costs no more than its own length. MP3 files, which DALI does not decode, become WAV files in the
    same way, whatever the suffix of their name.

    Raises:
        OSError: The file cannot be read.
        RuntimeError: The file is not a regular file; libsndfile cannot read an MP3 file or a segment (the message is
            libsndfile's); the segment begins after the file's end; or the file was written to a pipe, as FLAC or as
            MP3 of variable bit rate, and does not contain its length.
    """
    check_regular(clip.audio_filepath)
    if clip.offset is None:
        data = np.fromfile(clip.audio_filepath, np.uint8)
        head = data[:4].tobytes()
        # A count of 0 samples means an unknown length; libsndfile makes it 2^63 - 1, and DALI (2.4) then decodes into
        # too little memory.
        if head == b"fLaC" and not (data[21:22] & 15).any() and not data[22:26].any():
            raise RuntimeError(
                f"FLAC must count its samples, but this file, as if written to a pipe, does not; {_ADVICE}"
            )
        if not head.startswith((b"ID3", b"\xff")):  # an ID3 tag, or the first bits of an MPEG frame
            return data
    # Python opens the file first, because libsndfile's only message for a file that it cannot open is "System error".
    with clip.audio_filepath.open("rb"), soundfile.SoundFile(clip.audio_filepath) as file:
        if file.format == "MP3" and _length_is_guessed(clip.audio_filepath):
            raise RuntimeError(
                "MP3 of varying bit rate must say how long it is, but this file, as if written to a pipe, does not: "
                f"libsndfile would guess, and cut it; {_ADVICE}"
            )
        lead, frames = 0, -1
        if clip.offset is not None:
            start = round(clip.offset * file.samplerate)
            if start >= file.frames:
                lasts_s = file.frames / file.samplerate
                raise RuntimeError(f"begins {clip.offset:g} s into a file that lasts {lasts_s:.2f} s")
            # A frame of MP3 may need bits of earlier frames, so decoding begins up to a second before the segment.
            lead = min(start, file.samplerate) if file.format == "MP3" else 0
            _go_to(file, start - lead)
            frames = lead + round(clip.duration * file.samplerate)
        return _wav(file.read(frames, dtype="float32", always_2d=True)[lead:], file.samplerate)


def check_regular(path: Path) -> None:
    """Check that a path is a regular file; reading a pipe, for example, might never end.

    Raises:
        OSError: There is no such file.
        RuntimeError: The path is not a regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise RuntimeError("must be a regular file, but is a folder, a pipe or a device")


def _go_to(file: soundfile.SoundFile, start: int) -> None:
    """Go to a frame; if libsndfile cannot seek, as in GSM 6.10 of telephone calls, decode all frames before it."""
    if file.seekable():
        file.seek(start)
        return
    for done in range(0, start, _AT_ONCE):
        file.buffer_read(min(_AT_ONCE, start - done), dtype="int16")


def _length_is_guessed(path: Path) -> bool:
    """Return whether an MP3 file has a variable bit rate in its first 64 KiB, and no header that counts its frames."""
    with path.open("rb") as file:
        head = file.read(10)
        tag_bytes = 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=False))
        file.seek(tag_bytes if head.startswith(b"ID3") else 0)
        data = file.read(1 << 16)
    if any(header in data[:200] for header in (b"Xing", b"Info", b"VBRI")):
        return False
    found, place = set(), 0
    while place + 4 <= len(data) and data[place] == 0xFF and data[place + 1] & 0xE6 == 0xE2:  # frames of layer III
        version, bit_rate, rate = data[place + 1] >> 3 & 3, data[place + 2] >> 4, data[place + 2] >> 2 & 3
        if version == 1 or bit_rate in (0, 15) or rate == 3:  # reserved version; free or bad bit rate; reserved rate
            break
        is_mpeg1 = version == 3
        kilobits_per_s = (_MPEG1_KBIT_S if is_mpeg1 else _MPEG2_KBIT_S)[bit_rate - 1]
        rate_hz = (44100, 48000, 32000)[rate] // {3: 1, 2: 2, 0: 4}[version]
        found.add(bit_rate)
        place += (144_000 if is_mpeg1 else 72_000) * kilobits_per_s // rate_hz + (data[place + 2] >> 1 & 1)
    return len(found) > 1


_MPEG1_KBIT_S = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBIT_S = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""The bit rates of layer III in MPEG-2 and 2.5, in kbit/s, by the index in a frame header, from 1."""


def _wav(samples: npt.NDArray[np.float32], rate_hz: int) -> Encoded:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format="WAV", subtype="FLOAT")
    return np.frombuffer(buffer.getvalue(), np.uint8)


STAND_IN = _wav(np.zeros((1, 1), np.float32), SAMPLE_RATE_HZ)
"""A WAV file with one sample of silence, which replaces a clip that cannot be decoded."""


def decode(data: DataNode, rate_hz: Any) -> DataNode:
    """Add decoding to a DALI graph: encoded bytes of any rate and channels -> [samples] float32 mono at `rate_hz`."""
    signal, _ = fn.decoders.audio(data, sample_rate=rate_hz, dtype=types.FLOAT, downmix=True)
    return signal


def level(signal: DataNode) -> DataNode:
    """Add a signal's level to a DALI graph: its root mean square without its constant offset.

    :data:`RINGING` samples at either end (of a short signal, 1/50 of its length) are left out.
    """
    size = signal.shape(dtype=types.INT32)
    edge = graph_math.min(size // 50, RINGING)
    inner = fn.slice(signal, start=edge, shape=size - 2 * edge, axes=[0])
    return fn.reductions.std_dev(inner, fn.reductions.mean(inner))


def decoding_error(clip: Clip) -> str | None:
    """Return why a clip cannot be decoded, as the message of the file system or of DALI; None if it can."""

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> DataNode:
        data = fn.external_source(source=lambda: [encoded(clip)], dtype=types.UINT8, ndim=1)
        return decode(data, float(SAMPLE_RATE_HZ))

    try:
        pipeline = graph()
        pipeline.build()
        pipeline.run()
    except (OSError, RuntimeError) as error:
        return error_words(error)
    return None


def error_words(error: Exception) -> str:
    """Return the first line of an error's message, without DALI's description of the place in its graph."""
    _, _, words = str(error).rpartition("encountered:")
    return words.strip().partition("\n")[0]
