"""Whole files: training reads exactly what the SDK sends of them, to the sample, or refuses them by name."""

import dataclasses
import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_client import InvalidAudio, _containers, _mpeg
from carnelian_client._audio import encode_audio
from carnelian_client._retry import Deadline
from carnelian_training.data import containers, mpeg
from carnelian_training.data.audio import encoded
from carnelian_training.data.manifest import Clip

TAG = b"ID3\x04\0\0\0\0\x08\0" + bytes(1024)
OLD_TAG = b"TAG" + bytes(125)
NOT_AUDIO = np.random.default_rng(1).integers(0, 256, 3000, np.uint8).tobytes()


def file_of(format_, subtype=None, *, seconds=3, rate_hz=16_000, seed=0, **options):
    """Noise that is loud in its first second, so that a variable bit rate varies."""
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, seconds * rate_hz)
    noise[rate_hz:] *= 1e-3
    file = io.BytesIO()
    soundfile.write(file, noise, rate_hz, format=format_, subtype=subtype, **options)
    return file.getvalue()


def edited(data, changes):
    """The bytes with others at some places."""
    data = bytearray(data)
    for place, new in changes.items():
        data[place : place + len(new)] = new
    return bytes(data)


def piped(data):
    """An MP3 file as encoders write it to a pipe: without its first frame, which counts the others."""
    return data[data.index(data[:2], 4) :]


def in_wav(mpeg_audio, form=0x55, *, is_piped=False):
    """MPEG audio in a WAV file, as `ffmpeg -c:a copy` writes it; to a pipe, without sizes."""
    fmt = struct.pack("<HHIIHH", form, 1, 16_000, 8000, 1, 0)
    chunks = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"fact" + struct.pack("<II", 4, 16_000)
    chunks += b"data" + struct.pack("<I", 2**32 - 1 if is_piped else len(mpeg_audio)) + mpeg_audio
    chunks += bytes(len(chunks) % 2)
    return b"RIFF" + struct.pack("<I", 2**32 - 1 if is_piped else len(chunks)) + chunks


WAV, AIFF, FLAC = file_of("WAV", "PCM_16"), file_of("AIFF", "PCM_16"), file_of("FLAC")
VORBIS, OPUS = file_of("OGG", "VORBIS"), file_of("OGG", "OPUS")
MP3 = file_of("MP3")
MP2 = (b"\xff\xfd\xa4\0" + bytes(572)) * 125  # frames of silence, 192 kbit/s at 48 kHz
VARIABLE = file_of("MP3", seconds=20, bitrate_mode="VARIABLE", compression_level=0.5)
COUNT = max(VARIABLE.find(b"Xing"), VARIABLE.find(b"Info")) + 4
SLOW, FAST = (file_of("MP3", bitrate_mode="CONSTANT", compression_level=level) for level in (0.9, 0.0))
SMALL = file_of("MP3", seconds=10, rate_hz=44_100, bitrate_mode="CONSTANT", compression_level=0.9)
# Its first frame is a byte longer than most, so that libsndfile guesses 0.5 s too few.
PADDED = file_of("MP3", seconds=60, rate_hz=22_050, bitrate_mode="CONSTANT", compression_level=0.9)

READ = {
    "wav": (3, WAV),
    "wav of 24 bits": (3, file_of("WAV", "PCM_24")),
    "wav of floats": (3, file_of("WAV", "FLOAT")),
    "wav of a telephone": (3, file_of("WAV", "ULAW", rate_hz=8000)),
    "wav, big-endian": (3, file_of("WAV", "PCM_16", endian="BIG")),
    "wav that was never closed": (3, edited(WAV, {4: bytes(4), 40: bytes(4)})),
    "wav that was never closed, in a RIFF of any length": (3, edited(WAV, {4: b"\xff" * 4, 40: bytes(4)})),
    "wav from a pipe": (3, edited(WAV, {4: b"\xff" * 4, 40: b"\xff" * 4})),
    "wav behind a tag": (3, TAG + WAV),
    "wav behind two tags": (3, TAG + TAG + WAV),
    "mp3 behind two tags": (3, TAG + TAG + MP3),
    "mp3 behind a tag with a footer": (3, TAG[:5] + b"\x10" + TAG[6:] + b"3DI" + TAG[3:5] + b"\x10" + TAG[6:10] + MP3),
    "rf64": (3, file_of("RF64", "PCM_16")),
    "flac": (3, FLAC),
    "flac from a pipe": (3, edited(FLAC, {21: bytes([FLAC[21] & 0xF0]), 22: bytes(4)})),
    "flac behind a tag": (3, TAG + FLAC),
    "vorbis": (3, VORBIS),
    "vorbis behind a tag": (3, TAG + VORBIS),
    "opus": (3, OPUS),
    "opus behind a tag": (3, TAG + OPUS),
    "aiff": (3, AIFF),
    "aiff behind a tag": (3, TAG + AIFF),
    "au": (3, file_of("AU", "PCM_16")),
    "caf": (3, file_of("CAF", "PCM_16")),
    "mp3": (3, MP3),
    "mp3 behind a tag": (3, TAG + MP3),
    "mp3 before a tag": (3, MP3 + OLD_TAG),
    "mp3 before what is no audio": (3, MP3 + NOT_AUDIO),
    "mp3 of variable bit rate": (20, VARIABLE),
    "mp3 of variable bit rate, without a count": (20, edited(VARIABLE, {COUNT: bytes(4)})),
    "mp3 of variable bit rate that counts 0": (20, edited(VARIABLE, {COUNT + 4: bytes(4)})),
    "mp3 of variable bit rate from a pipe": (20, piped(VARIABLE)),
    "mp3 from a pipe, cut within a frame": (20, piped(VARIABLE)[:-50]),
    "mp3 from a pipe, before a tag": (20, piped(VARIABLE) + OLD_TAG),
    "mp3 from a pipe, behind a tag": (20, TAG + piped(VARIABLE)),
    "mp3 from a pipe, slower at its end": (6, piped(FAST) + piped(SLOW)),
    "mp3 from a pipe, faster at its end": (6, piped(SLOW) + piped(FAST)),
    "mp3 from a pipe, of whose frames some are padded": (60, piped(PADDED)),
    "mp3 in wav": (3, in_wav(MP3)),
    "mp3 in wav behind zeros": (3, in_wav(bytes(40) + MP3)),
    "mp3 in wav behind ones": (3, in_wav(b"\xff" * 41 + MP3)),
    "mp3 in wav, cut within a frame": (3, in_wav(piped(MP3)[100:])),
    "mp3 in wav from a pipe": (3, in_wav(piped(MP3), is_piped=True)),
    "mp3 in wav behind a tag": (3, TAG + in_wav(MP3)),
    "mp3 of variable bit rate in wav": (20, in_wav(piped(VARIABLE))),
    "mp2 in wav": (3, in_wav(MP2, 0x50)),
}
REFUSED = {
    "flac twice": (FLAC + FLAC, "one behind the other"),
    "mp3 twice": (MP3 + MP3, "goes on behind its end, .*one behind the other"),
    "vorbis twice": (VORBIS + file_of("OGG", "VORBIS", seed=1), "one behind the other"),
    "opus twice": (OPUS + file_of("OGG", "OPUS", seed=1), "one behind the other"),
    "the same vorbis twice": (VORBIS + VORBIS, "one behind the other"),
    "ogg twice behind a tag": (TAG + VORBIS + OPUS, "one behind the other"),
    "mp3 twice, with something between": (MP3 + NOT_AUDIO + MP3, "one behind the other"),
    "mp3 in wav twice": (in_wav(MP3) * 2, "one behind the other"),
    "mp3 damaged within a frame": (edited(piped(SMALL), {len(SMALL) // 2 + 209: bytes(500)}), "damaged within"),
    "mp3 damaged within": (edited(VARIABLE, {30_000: bytes(5000)}), "internal error"),
    "mp3 from a pipe, damaged within": (edited(piped(VARIABLE), {30_000: bytes(5000)}), "internal error"),
    "samples without a header": (b"\xff\xff" * 2 + WAV[44:], "no second frame follows"),
    "mp3 in wav without any": (in_wav(b""), "no samples"),
    "mp3 in wav without any, before a chunk": (edited(in_wav(b"") + b"LIST" + bytes(4), {4: b"\x38"}), "no samples"),
    "no frames in wav of mp3": (in_wav(bytes(4000)), "Format not recognised"),
    "text": (b"this is no sound", "Format not recognised"),
    "nothing": (b"", "no samples|not a single byte"),
}


@pytest.fixture
def clip_of(tmp_path):
    """A manifest's line of a file with these bytes."""

    def write(data):
        path = tmp_path / "clip"
        path.write_bytes(data)
        return Clip(path, 3.0, "a")

    return write


def check_that_training_reads_what_the_sdk_sends(name, clip_of):
    seconds, data = READ[name]
    in_training = encoded(clip_of(data)).tobytes()
    (heard, rate_hz), (sent, sent_rate_hz) = (
        soundfile.read(io.BytesIO(file), dtype="float32") for file in (in_training, encode_audio(data, Deadline(60)))
    )
    assert rate_hz == sent_rate_hz
    np.testing.assert_array_equal(heard, sent)
    assert len(heard) / rate_hz == pytest.approx(seconds, abs=0.3)  # MP3 has whole frames, and a delay


@pytest.mark.parametrize("name", READ)
def test_training_reads_what_the_sdk_sends(name, clip_of):
    check_that_training_reads_what_the_sdk_sends(name, clip_of)


@pytest.mark.parametrize("beside", [".AppleDouble", "._"])
@pytest.mark.parametrize("name", ["mp3", "mp3 behind a tag", "mp3 of variable bit rate from a pipe", "mp3 in wav"])
def test_what_mac_os_leaves_in_the_working_directory_hides_no_mp3(name, beside, clip_of, tmp_path, monkeypatch):
    """There libsndfile looked for the resource fork of a file in memory, which has no name."""
    (tmp_path / "share" / beside).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "share")
    check_that_training_reads_what_the_sdk_sends(name, clip_of)
    clip = clip_of(READ[name][1])
    whole, segment = (encoded(dataclasses.replace(clip, offset=offset)).tobytes() for offset in (None, 0.0))
    samples, rate_hz = soundfile.read(io.BytesIO(segment), dtype="float32")
    heard, _ = soundfile.read(io.BytesIO(whole), 3 * rate_hz, dtype="float32")
    np.testing.assert_allclose(samples, heard, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_training_refuses_what_the_sdk_refuses(name, clip_of):
    data, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        encoded(clip_of(data))
    with pytest.raises(InvalidAudio, match=words):
        encode_audio(data, Deadline(60))


def test_a_wav_that_was_never_closed_is_copied_once():
    data = edited(WAV, {4: bytes(4), 40: bytes(4)}) + bytes(2**20)
    tracemalloc.start()
    try:
        assert len(containers.closed(data)) == len(data)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("ours", "theirs"), [(mpeg, _mpeg), (containers, _containers)])
def test_training_and_the_sdk_look_at_files_alike(ours, theirs):
    """Neither may need the other, so each has a copy."""
    assert Path(ours.__file__).read_bytes() == Path(theirs.__file__).read_bytes()
