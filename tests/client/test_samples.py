"""Samples that are given as arrays."""

import array
import mmap

import numpy as np
import pytest
from carnelian_client import InvalidAudio
from carnelian_client._audio import wav_from_samples


@pytest.mark.parametrize("shape", [(3000,), (1000, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "int32", "uint8"])
def test_samples_become_a_wav_at_their_own_rate(shape, dtype, encode, read):
    silence, loudest = {"int16": (0, 2**15), "int32": (0, 2**31), "uint8": (128, 128)}.get(dtype, (0, 1))
    signal = np.random.default_rng(0).uniform(-1, 1, shape)
    samples = (silence + loudest * signal).astype(dtype)
    sent, rate = read(encode((samples, 44100)))
    assert rate == 44100
    np.testing.assert_array_equal(sent, ((samples.astype(np.float64) - silence) / loudest).astype(np.float32))


def test_a_wav_chunk_has_an_even_length(encode, read):
    sent = encode((np.array([0, 128, 255], np.uint8), 16000))
    assert len(sent) == 8 + int.from_bytes(sent[4:8], "little") == 48
    np.testing.assert_array_equal(read(sent)[0], [-1, 0, 127 / 128])


def test_samples_that_are_not_contiguous_or_not_native_are_written_right(read):
    samples = np.arange(100, dtype=">i2").reshape(2, 50).T
    np.testing.assert_array_equal(read(wav_from_samples(samples, 16000), "int16")[0], samples)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.zeros(0, np.float32), "no samples"),
        (np.array([0, np.nan]), "not finite"),
        (np.array([0, -np.inf]), "not finite"),
        (np.array([1e300]), "not finite"),
        (np.array([4, -23170], np.float32), r"in \[-1, 1\], but reach 23170; divide those of 16 bits by 32768"),
        (np.zeros((2, 16000)), "transpose"),
        (np.zeros((1, 2, 3)), r"\[1, 2, 3\]"),
        (np.float32(0), r"shape \[\]"),
        (np.zeros(3, np.int64), "int16, int32 or uint8, but are int64; convert them"),
        (np.zeros(3, bool), "but are bool"),
        (np.zeros(3, "S2"), r"but are \|S2; convert them"),
    ],
)
def test_samples_that_are_no_clip_are_invalid(samples, words, encode):
    with pytest.raises(InvalidAudio, match=words):
        encode((samples, 16000))


RAW = np.arange(-500, 500, dtype="<i2").tobytes()


def mapped(data):
    area = mmap.mmap(-1, len(data))
    area.write(data)
    return area


@pytest.mark.parametrize(
    "samples",
    [
        RAW,
        bytearray(RAW),
        memoryview(RAW),
        memoryview(RAW).cast("b"),
        memoryview(RAW).cast("c"),
        array.array("B", RAW),
        mapped(RAW),
    ],
    ids=["bytes", "bytearray", "B", "b", "c", "array", "mmap"],
)
def test_bytes_are_no_samples(samples, encode, client):
    """NumPy takes a buffer of bytes for samples of 8 bits, which those of 16 bits are noise as."""
    advice = r"samples must be an array, but are bytes; make one by `numpy.frombuffer\(data, '<i2'\)`, or 'u1'"
    with pytest.raises(InvalidAudio, match=advice):
        encode((samples, 16000))
    with pytest.raises(InvalidAudio, match=advice):
        list(client.transcribe_stream([samples], 16000))


@pytest.mark.parametrize("samples", [memoryview(RAW).cast("h"), array.array("h", RAW)], ids=["memoryview", "array"])
def test_a_buffer_of_a_type_is_samples(samples, encode):
    assert encode((samples, 16000)) == encode((np.frombuffer(RAW, "<i2"), 16000))


class Unreadable:
    """As a tensor that requires a gradient, or lies on a GPU."""

    def __array__(self, *arguments, **options):
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("samples", "words"), [(Unreadable(), r"call detach\(\) first"), ([[1.0], [1.0, 2.0]], "shape")]
)
def test_samples_that_numpy_cannot_take_are_invalid(samples, words, encode):
    with pytest.raises(InvalidAudio, match=f"samples must be a NumPy array, or become one, but: .*{words}"):
        encode((samples, 16000))


def test_a_rate_must_be_a_whole_positive_number(encode, read):
    for rate in (0, 2**24, 2**32):
        with pytest.raises(InvalidAudio, match="at least 1 Hz and at most 16777215, but is"):
            encode((np.zeros(10), rate))
    assert read(encode((np.zeros((10, 64)), 2**24 - 1)))[1] == 2**24 - 1
    for rate in (11025.0, np.float32(11025), np.int64(11025), np.array(11025)):
        assert read(encode((np.zeros(10), rate)))[1] == 11025
    for clip in (
        (np.zeros(10), 16000.5),
        (np.zeros(10), np.inf),
        (np.zeros(10), "16000"),
        (np.zeros(10), True),
        (16000, np.zeros((2, 10))),
    ):
        with pytest.raises(InvalidAudio, match=r"must be `\(samples, rate\)`, the rate a whole number of Hz"):
            encode(clip)


def test_samples_that_no_server_takes_are_not_copied(encode):
    endless = np.lib.stride_tricks.as_strided(np.zeros(1, "<i2"), (2**39,), (0,))
    with pytest.raises(
        InvalidAudio, match=r"shape \(549755813888,\) .* but has 1099511627776; convert it to FLAC, or cut"
    ):
        encode((endless, 16000))
