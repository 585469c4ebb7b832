"""The stage `audio_decode` of the real repository, through gRPC."""

import io
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_serving.launcher import Server

RATE = 16_000
LIMIT_SAMPLES = 60 * RATE
UNKNOWN_LENGTH = 2**31 - 1
# PCM16 and the 16-bit FLAC round to 2^-15; mu-law and the lossy codecs are coarser.
EXACT, COARSE, LOSSY = 1e-4, 0.02, 0.05


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    """Returns [samples] float64 of a 440 Hz tone."""
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)


def encode(samples: np.ndarray, rate: int = RATE, container: str = "WAV", subtype: str = "PCM_16") -> np.ndarray:
    """Returns the bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.fixture(scope="module")
def served(server, connect):
    return connect(server.grpc_url)


def decode(served: Any, file: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns SIGNAL [samples] and SIGNAL_LENGTH."""
    answer = served.infer("audio_decode", AUDIO=file[None])
    assert answer["SIGNAL"].dtype == np.float32
    assert answer["SIGNAL_LENGTH"].dtype == np.int32
    assert answer["SIGNAL_LENGTH"].shape == (1, 1)
    return answer["SIGNAL"][0], int(answer["SIGNAL_LENGTH"].item())


@pytest.mark.parametrize(
    ("container", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", EXACT),
        ("WAV", "PCM_24", EXACT),
        ("WAV", "FLOAT", EXACT),
        ("WAV", "PCM_U8", COARSE),
        ("WAV", "ULAW", COARSE),
        ("WAV", "ALAW", COARSE),
        ("FLAC", "PCM_16", EXACT),
        ("OGG", "VORBIS", LOSSY),
        ("OGG", "OPUS", LOSSY),
    ],
)
def test_each_format_gives_the_samples(served, container, subtype, tolerance):
    wanted = tone(1.0)
    signal, length = decode(served, encode(wanted, RATE, container, subtype))
    assert length == len(signal) == RATE
    # A codec rings where the tone starts and ends.
    np.testing.assert_allclose(signal[400:-400], wanted[400:-400], atol=tolerance)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_each_rate_becomes_16_khz(served, rate):
    signal, length = decode(served, encode(tone(1.0, rate), rate))
    assert length == len(signal) == RATE
    np.testing.assert_allclose(signal[400:-400], tone(1.0)[400:-400], atol=COARSE)


@pytest.mark.parametrize("rate", [22_050, 24_000, 44_100, 48_000, 192_000])
def test_what_16_khz_cannot_hold_is_not_heard_as_other_frequencies(served, rate):
    within, above = (np.sin(2 * np.pi * hz * np.arange(rate) / rate) / 2 for hz in (7_100, 8_250))
    heard, _ = decode(served, encode(within + above, rate, subtype="FLOAT"))
    wanted = np.sin(2 * np.pi * 7_100 * np.arange(RATE) / RATE) / 2
    np.testing.assert_allclose(heard[400:-400], wanted[400:-400], atol=EXACT * 20)


@pytest.mark.parametrize("rate", [24_000, 48_000])  # one of each way in which Ogg is read
def test_nor_is_it_in_opus(served, rate):
    hiss = np.sin(2 * np.pi * 10_500 * np.arange(rate) / rate) / 2
    heard, _ = decode(served, encode(hiss, rate, "OGG", "OPUS"))
    assert np.abs(heard[1600:-1600]).max() < 0.01


def test_channels_are_averaged(served):
    stereo = np.stack([tone(0.5), np.zeros(RATE // 2)], axis=1)
    signal, _ = decode(served, encode(stereo))
    np.testing.assert_allclose(signal, tone(0.5) / 2, atol=EXACT)


def test_an_odd_length_is_rounded_up_when_resampled(served):
    signal, length = decode(served, encode(np.zeros(44_101), 44_100))
    assert length == len(signal) == RATE + 1


def test_a_file_without_samples_has_length_0_and_one_sample(served):
    signal, length = decode(served, encode(np.zeros(0)))
    assert length == 0
    assert signal.tolist() == [0.0]


def test_zeros_after_the_file_are_ignored(served):
    padded = np.concatenate([encode(tone(0.25)), np.zeros(1000, np.uint8)])
    assert decode(served, padded)[1] == RATE // 4


def test_not_finite_samples_pass(served):
    samples = tone(0.1)
    samples[[5, 700]] = np.nan, np.inf
    signal, length = decode(served, encode(samples, subtype="FLOAT"))
    assert length == 1600
    assert np.isnan(signal[5])
    assert np.isinf(signal[700])
    assert decode(served, encode(samples, 8_000, subtype="FLOAT"))[1] == 3200


def test_a_clip_of_the_limit_is_whole_and_a_longer_one_is_cut_with_an_honest_length(served):
    signal, length = decode(served, encode(np.zeros(LIMIT_SAMPLES)))
    assert length == len(signal) == LIMIT_SAMPLES
    signal, length = decode(served, encode(np.zeros(LIMIT_SAMPLES + 1)))
    assert (len(signal), length) == (1, LIMIT_SAMPLES + 1)
    signal, length = decode(served, encode(np.zeros(60 * 48_000), 48_000, "FLAC"))
    assert length == len(signal) == LIMIT_SAMPLES
    signal, length = decode(served, encode(np.zeros((61 * 48_000, 2)), 48_000, "FLAC"))
    assert (len(signal), length) == (1, 61 * RATE)


NO_COUNT = 2**64 - 1
"""A page's count if no packet ends on it."""


def pages(file: np.ndarray) -> list[bytes]:
    """The pages of an Ogg file."""
    data, found, start = file.tobytes(), [], 0
    while start < len(data):
        segments = data[start + 26]
        end = start + 27 + segments + sum(data[start + 27 : start + 27 + segments])
        found.append(data[start:end])
        start = end
    return found


def changed(page: bytes, *, count: int | None = None, serial: int | None = None) -> bytes:
    """The Ogg page with other fields, and the checksum that they make."""
    new = bytearray(page)
    for value, start, end in ((count, 6, 14), (serial, 14, 18), (0, 22, 26)):
        if value is not None:
            new[start:end] = value.to_bytes(end - start, "little")
    checksum = 0  # CRC-32 of Ogg: polynomial 0x04C11DB7, bits not reflected, from 0
    for byte in new:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = checksum << 1 ^ (0x1_04C1_1DB7 if checksum >> 31 else 0)
    new[22:26] = checksum.to_bytes(4, "little")
    return bytes(new)


def join(*parts: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8)


def speech(rate: int, seconds: float = 2.0, codec: str = "OPUS") -> np.ndarray:
    """An Ogg file of noise in several pages: of a tone all is in one."""
    return encode(np.random.default_rng(0).uniform(-0.3, 0.3, round(seconds * rate)), rate, "OGG", codec)


WAV = encode(tone(0.5))
FLAC = encode(tone(0.5), container="FLAC")
BROKEN = {
    "empty": WAV[:0],
    "text": np.frombuffer(b"What is this? " * 50, np.uint8),
    "zeros": np.zeros(5000, np.uint8),
    "wav header cut": WAV[:30],
    "flac header cut": FLAC[:40],
    "flac cut": FLAC[: len(FLAC) // 2],
    "ogg header cut": encode(tone(0.5), container="OGG", subtype="OPUS")[:4],
    "mp3": encode(tone(0.5), container="MP3", subtype="MPEG_LAYER_III"),
    # libsndfile reads them, and some twenty others, of which one prints what they hold.
    **{kind: encode(tone(0.5), container=kind) for kind in ("AIFF", "AU", "CAF", "W64", "RF64")},
    "MIDI": np.frombuffer(
        bytes.fromhex("f07e00010000102468037f7f7f00000000000000f7") + b"What is this? " * 12, np.uint8
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_answered_in_the_words_of_dali_and_alone(served, name):
    files = [WAV, BROKEN[name], FLAC, BROKEN[name], WAV]
    answers = served.infer_at_once("audio_decode", [{"AUDIO": file[None]} for file in files])
    for file, answer in zip(files, answers, strict=True):
        if file is BROKEN[name]:
            assert isinstance(answer, Exception)
            assert "nvidia.dali.fn.decoders.audio" in str(answer)
        else:
            assert answer["SIGNAL_LENGTH"].item() == RATE // 2


def words_for_id(server: Any, request_id: bytes) -> bytes:
    """Sends a text under an id through HTTP, as no client of Triton's does; returns how it is refused."""
    tensor = b'{"name": "AUDIO", "datatype": "UINT8", "shape": [1, 5], "parameters": {"binary_data_size": 5}}'
    header = b'{"id": "%b", "inputs": [%b]}' % (request_id, tensor)
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/audio_decode/infer", header + b"hello")
    request.add_header("Inference-Header-Content-Length", str(len(header)))
    request.add_header("Content-Type", "application/octet-stream")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        assert answer.code == 400
        return answer.read()


def test_an_id_that_is_no_text_does_no_harm(server):
    """Triton's HTTP server lets it pass, and Python cannot read it."""
    assert b"nvidia.dali.fn.decoders.audio" in words_for_id(server, b"\xff")


def test_an_id_that_is_no_text_has_a_bound_too(server):
    if not isinstance(server, Server):
        pytest.skip("the native backends are not ours")
    words = b"the `id` of a request must have at most 1,024 bytes, but this one has 1,025"
    assert words in words_for_id(server, b"\xff" * 1025)


@pytest.mark.parametrize(("bytes_kept", "samples"), [(44, 0), (1044, 500)])
def test_a_wav_that_ends_early_keeps_what_it_has(served, bytes_kept, samples):
    assert decode(served, WAV[:bytes_kept])[1] == samples


@pytest.mark.parametrize("codec", ["VORBIS", "OPUS"])
def test_an_ogg_file_that_is_cut_short_keeps_what_it_has(served, codec):
    whole = speech(48_000, 5, codec)
    page = len(b"".join(pages(whole)[:-1])) + 10  # in the middle of a header
    assert 0 < decode(served, whole[:page])[1] < 5 * RATE
    assert 0 < decode(served, whole[: whole.size * 6 // 10])[1] < decode(served, whole)[1] == 5 * RATE


def test_a_forged_flac_length_is_an_error_and_not_an_outage(served):
    forged = FLAC.copy()
    forged[21] |= 0x0F  # STREAMINFO's 36-bit number of samples
    forged[22:26] = 0xFF
    (answer,) = served.infer_at_once("audio_decode", [{"AUDIO": forged[None]}])
    assert isinstance(answer, Exception)
    assert decode(served, WAV)[1] == RATE // 2


@pytest.mark.parametrize("samples", [2**30, 2**33])
def test_an_opus_file_that_claims_hours_is_refused_before_memory_is_taken_for_them(server, served, samples):
    if not isinstance(server, Server):
        pytest.skip("the native backend bounds no memory, and would take it")
    *others, last = pages(speech(48_000))
    forged = join(*others, changed(last, count=samples))
    (answer,) = served.infer_at_once("audio_decode", [{"AUDIO": forged[None]}])
    assert "too little memory for an input of this length, or of the length that it claims" in str(answer)
    assert decode(served, WAV)[1] == RATE // 2


@pytest.mark.parametrize("codec", ["VORBIS", "OPUS"])
@pytest.mark.parametrize("samples", [2**48, 2**61, 2**62, 2**62 + 10_312, 2**63 - 1, 2**63 + 10_312])
def test_an_ogg_file_whose_claim_overflows_is_not_decoded(served, codec, samples):
    *others, last = pages(speech(48_000, codec=codec))
    for forged in (join(*others, changed(last, count=samples)), join(*others[:-1], changed(others[-1], count=samples))):
        assert decode(served, forged)[1] == UNKNOWN_LENGTH
    assert decode(served, WAV)[1] == RATE // 2


@pytest.mark.parametrize("rate", [12_000, 24_000])
@pytest.mark.parametrize("samples", [0, 100])
def test_an_opus_file_that_ends_before_it_begins_is_an_error_and_not_an_outage(served, rate, samples):
    *others, last = pages(speech(rate))
    forged = join(*others, changed(last, count=samples))
    (answer,) = served.infer_at_once("audio_decode", [{"AUDIO": forged[None]}])
    assert isinstance(answer, Exception)
    assert decode(served, WAV)[1] == RATE // 2


@pytest.mark.parametrize("rate", [RATE, 48_000])
def test_an_opus_file_of_which_no_length_can_be_read_is_not_decoded(served, rate):
    head, *others = pages(speech(rate))
    uncounted = [changed(page, count=NO_COUNT) for page in others]
    strange = changed(others[-1], serial=1)
    for forged in (
        join(head, *uncounted),
        join(head, *others[:-1], uncounted[-1]),
        # Another first page before it, whose checksum is wrong, would hide what it is.
        join(head[:22], bytes(4), head[26:], head, *others),
        join(head, *others, *[strange] * (70_000 // len(strange) + 1)),  # so far that the last page is not found
    ):
        assert decode(served, forged)[1] == UNKNOWN_LENGTH
    assert decode(served, WAV)[1] == RATE // 2


@pytest.mark.parametrize(("codec", "rate"), [("VORBIS", RATE), ("OPUS", RATE), ("OPUS", 48_000)])
@pytest.mark.parametrize("seconds", [1, 25])
def test_ogg_files_one_behind_the_other_are_not_cut_to_the_first(served, codec, rate, seconds):
    file = speech(rate, seconds, codec)
    for second in (speech(rate, seconds, codec), file):
        signal, length = decode(served, np.concatenate([file, second]))
        assert (signal.tolist(), length) == ([0.0], UNKNOWN_LENGTH)
    assert decode(served, file)[1] == seconds * RATE


@pytest.mark.parametrize("rate", [8_000, 12_000, RATE, 24_000, 48_000])
def test_opus_of_each_rate_becomes_16_khz(served, rate):
    signal, length = decode(served, encode(tone(1.0, rate), rate, "OGG", "OPUS"))
    assert length == len(signal) == RATE
    # At 8 kHz it rings for a tenth of a second, and by more.
    np.testing.assert_allclose(signal[1600:-1600], tone(1.0)[1600:-1600], atol=2 * LOSSY)


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (44_100, 1), (44_100, 2)])
def test_a_flac_file_that_was_written_to_a_pipe_is_not_decoded(served, rate, channels):
    piped = encode(np.stack([tone(0.5, rate)] * channels, axis=1), rate, "FLAC").copy()
    piped[21] &= 0xF0  # STREAMINFO's 36-bit number of samples: 0 is unknown
    piped[22:26] = 0
    tagged = np.concatenate([np.frombuffer(b"ID3\3\0\0\0\0\0\0", np.uint8), piped])
    blocks = [np.array([1 << bit, 0, 0, 4, 0, 0, 0, 0], np.uint8) for bit in range(7)]  # the type has seven bits
    hidden = [np.concatenate([piped[:4], block, piped[4:]]) for block in blocks]
    for file in (piped, tagged, *hidden):
        signal, length = decode(served, file)
        assert (signal.tolist(), length) == ([0.0], UNKNOWN_LENGTH)
    assert decode(served, FLAC)[1] == RATE // 2


def test_more_requests_than_the_queue_holds_are_turned_away_at_once(served):
    slow = encode(np.random.default_rng(0).uniform(-1, 1, 50 * RATE), container="OGG", subtype="OPUS")
    answers = served.infer_at_once("audio_decode", [{"AUDIO": slow[None]}] * 120)
    turned_away = [answer for answer in answers if isinstance(answer, Exception)]
    assert 0 < len(turned_away) < 100
    assert all("maximum queue size" in str(error) for error in turned_away)
    assert decode(served, WAV)[1] == RATE // 2


def test_no_audio_and_no_error_of_a_client_reaches_the_log(server, served):
    before = list(server.log)
    decode(served, WAV)
    served.infer_at_once("audio_decode", [{"AUDIO": BROKEN[name][None]} for name in ("text", "MIDI")])
    time.sleep(0.2)
    new = [line for line in server.log if line not in before]
    assert not [line for line in new if "What is this?" in line or " refuses: " in line]
    if isinstance(server, Server):  # the native backend logs the reason
        assert not [line for line in new if "Error" in line]
