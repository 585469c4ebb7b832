"""The encoded sound of a clip, and the DALI operators that decode it."""

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
"""Samples at a clip's ends, 10 ms: there a constant offset that was resampled rings."""
_AT_ONCE = 1 << 16  # frames
_ADVICE = "write it anew, for example with `ffmpeg -i IN OUT.flac`"


def encoded(clip: Clip) -> Encoded:
    """The bytes of a sound file that holds the clip and nothing else.

    A clip that begins inside its file is cut out as a WAV file in memory, at the file's own rate, so that a segment of
    a long recording costs what it lasts. MP3 files, which DALI does not decode, become WAV files in the same way,
    whatever their name ends in.

    Raises:
        OSError: The file cannot be read.
        RuntimeError: It is no regular file, or a segment begins behind the file's end, or libsndfile cannot read it, or
            an MP3 file; its words. Or the file was written to a pipe, as FLAC or as MP3 of varying bit rate, and does
            not say how long it is.
    """
    check_regular(clip.audio_filepath)
    if clip.offset is None:
        data = np.fromfile(clip.audio_filepath, np.uint8)
        head = data[:4].tobytes()
        # Of 0 libsndfile makes 2^63 - 1, and DALI (2.4) then decodes into too little memory.
        if head == b"fLaC" and not (data[21:22] & 15).any() and not data[22:26].any():
            raise RuntimeError(
                f"FLAC must count its samples, but this file, as if written to a pipe, does not; {_ADVICE}"
            )
        if not head.startswith((b"ID3", b"\xff")):  # MPEG's tag, or the first bits of its frames
            return data
    # The file is opened twice: of one that cannot be, libsndfile says "System error" and no more.
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
            # A frame of MP3 may need bits of those before it, which a decoder that begins there does not have.
            lead = min(start, file.samplerate) if file.format == "MP3" else 0
            _go_to(file, start - lead)
            frames = lead + round(clip.duration * file.samplerate)
        return _wav(file.read(frames, dtype="float32", always_2d=True)[lead:], file.samplerate)


def check_regular(path: Path) -> None:
    """Refuse what may never end, as a pipe that nobody writes to.

    Raises:
        OSError: There is no such file.
        RuntimeError: It is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise RuntimeError("must be a regular file, but is a folder, a pipe or a device")


def _go_to(file: soundfile.SoundFile, start: int) -> None:
    """Go to a frame; where libsndfile cannot jump, as in GSM 6.10 of telephone calls, by decoding what is before it."""
    if file.seekable():
        file.seek(start)
        return
    for done in range(0, start, _AT_ONCE):
        file.buffer_read(min(_AT_ONCE, start - done), dtype="int16")


def _length_is_guessed(path: Path) -> bool:
    """Whether the bit rate of an MP3 file varies in its first 64 KiB, and no header in front counts its frames."""
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
        if version == 1 or bit_rate in (0, 15) or rate == 3:  # no version; any bit rate, or none; no rate
            break
        is_mpeg1 = version == 3
        kilobits_per_s = (_MPEG1_KBIT_S if is_mpeg1 else _MPEG2_KBIT_S)[bit_rate - 1]
        rate_hz = (44100, 48000, 32000)[rate] // {3: 1, 2: 2, 0: 4}[version]
        found.add(bit_rate)
        place += (144_000 if is_mpeg1 else 72_000) * kilobits_per_s // rate_hz + (data[place + 2] >> 1 & 1)
    return len(found) > 1


_MPEG1_KBIT_S = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBIT_S = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Of layer III, by a frame header's index from 1; MPEG-2 and 2.5."""


def _wav(samples: npt.NDArray[np.float32], rate_hz: int) -> Encoded:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format="WAV", subtype="FLOAT")
    return np.frombuffer(buffer.getvalue(), np.uint8)


STAND_IN = _wav(np.zeros((1, 1), np.float32), SAMPLE_RATE_HZ)
"""One sample of silence, in the place of a clip that cannot be decoded."""


def decode(data: DataNode, rate_hz: Any) -> DataNode:
    """Build the decoding: encoded bytes of any rate and channels -> [samples] float32 mono at `rate_hz`."""
    signal, _ = fn.decoders.audio(data, sample_rate=rate_hz, dtype=types.FLOAT, downmix=True)
    return signal


def level(signal: DataNode) -> DataNode:
    """Build the measure of how much there is to hear: the root mean square of a signal without its constant offset.

    :data:`RINGING` samples at either end, of short ones less, do not count.
    """
    size = signal.shape(dtype=types.INT32)
    edge = graph_math.min(size // 50, RINGING)
    inner = fn.slice(signal, start=edge, shape=size - 2 * edge, axes=[0])
    return fn.reductions.std_dev(inner, fn.reductions.mean(inner))


def decoding_error(clip: Clip) -> str | None:
    """Why a clip cannot be decoded, in the words of the file system or of DALI; None if it can."""

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
    """What went wrong, without DALI's account of where in its graph."""
    _, _, words = str(error).rpartition("encountered:")
    return words.strip().partition("\n")[0]
