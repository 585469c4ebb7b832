import array
import io
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import soundfile
from carnelian_client import DeadlineExceeded, InvalidAudio
from carnelian_client._audio import encode_audio
from carnelian_client._decoding import BLOCK_FRAMES, open_audio
from carnelian_client._retry import Deadline

RATE = 8000


def file_of(samples, fmt, subtype=None, rate=RATE, **options):
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate, format=fmt, subtype=subtype, **options)
    return sink.getvalue()


def piped(file):
    """As an encoder writes a FLAC or MP3 file that cannot go back: its beginning does not count what follows."""
    if file.startswith(b"fLaC"):
        return file[:21] + bytes([file[21] & 0xF0]) + bytes(4) + file[26:]
    return file[file.index(file[:2], 100) :]


@pytest.fixture
def noise():
    return np.random.default_rng(0).uniform(-1, 1, 3000)


@pytest.mark.parametrize(
    ("fmt", "rate"),
    [
        *((fmt, RATE) for fmt in [("WAV", "ULAW"), ("WAV", "DOUBLE"), ("FLAC", None), ("OGG", "VORBIS")]),
        *((("OGG", "OPUS"), rate) for rate in [16_000, 24_000, 48_000]),
    ],
)
def test_what_the_server_reads_goes_as_it_is(noise, fmt, rate, tmp_path, encode):
    data = file_of(noise, *fmt, rate=rate)
    path = tmp_path / "clip"
    path.write_bytes(data)
    for audio in (path, str(path), data, bytearray(data), memoryview(data)):
        assert encode(audio) == data


@pytest.mark.parametrize("num_bytes", [20, 2000])
@pytest.mark.parametrize(
    ("fmt", "endian"),
    [("WAV", None), ("WAV", "BIG"), ("AIFF", None), ("AIFF", "LITTLE"), ("FLAC", None), ("OGG", None), ("MP3", None)],
)
def test_nothing_is_lost_behind_a_tag(noise, fmt, endian, num_bytes, encode):
    file = file_of(noise, fmt, endian=endian)
    tag = b"ID3\4\0\0\0\0" + bytes([num_bytes >> 7, num_bytes & 127]) + bytes(num_bytes)
    tagged, tagged_twice, plain = (bytearray(encode(sound)) for sound in (tag + file, tag + tag + file, file))
    for sent in (tagged, tagged_twice, plain):
        if sent[48:52] == b"PEAK":  # libsndfile's chunk in WAV of floats has the second in which it was written
            sent[60:64] = bytes(4)
    assert tagged == tagged_twice == plain


@pytest.mark.parametrize("riff_size", [0, 36])
def test_a_recording_that_was_not_closed_is_sent_with_its_length(noise, riff_size, encode, read):
    whole = file_of(noise, "WAV", "PCM_16")
    assert whole[36:40] == b"data"
    left_open = whole[:4] + struct.pack("<I", riff_size) + whole[8:40] + bytes(4) + whole[44:]
    np.testing.assert_array_equal(read(encode(left_open))[0], read(whole)[0])


def test_nothing_is_looked_for_behind_what_is_no_chunk(noise, encode):
    """In zeros there was one every eight bytes: a second of Python for 10 MiB."""
    whole = file_of(noise, "WAV", "PCM_16")
    audio = b"RIFF" + bytes(4) + whole[8:36] + bytes(800) + b"data" + bytes(4) + whole[44:]
    assert encode(audio) == audio


def test_flac_that_was_written_to_a_pipe_is_sent_with_its_length(noise, encode, read):
    closed = file_of(noise, "FLAC", "PCM_24")
    assert soundfile.info(io.BytesIO(piped(closed))).frames > 2**36
    sent = encode(piped(closed))
    assert soundfile.info(io.BytesIO(sent)).subtype_info == "Signed 24 bit PCM"
    np.testing.assert_array_equal(read(sent)[0], read(closed)[0])


def test_a_closed_recording_without_samples_keeps_none(encode):
    tagged = file_of(np.zeros(0), "WAV", "PCM_16") + b"LIST\4\0\0\0INFO"
    tagged = tagged[:4] + struct.pack("<I", len(tagged) - 8) + tagged[8:]
    assert encode(tagged) == tagged


@pytest.mark.parametrize(("subtype", "bits"), [("PCM_S8", 8), ("PCM_16", 16), ("PCM_24", 24)])
def test_integers_become_flac_without_loss(subtype, bits, encode, read):
    exact = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5000, 2)) << (32 - bits)
    sent = encode(file_of(exact.astype(np.int32), "AIFF", subtype))
    assert sent[:4] == b"fLaC"
    samples, rate = read(sent, "int32")
    np.testing.assert_array_equal(samples, exact)
    assert rate == RATE


def test_floats_become_float_wav_without_loss(noise, encode, read):
    sent = encode(file_of(2 * noise, "AIFF", "FLOAT"))
    assert sent[:4] == b"RIFF"
    np.testing.assert_array_equal(read(sent)[0], (2 * noise).astype(np.float32))


def test_mp3_is_decoded_here_to_what_training_hears(encode, read):
    tone = np.sign(np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE))  # whose MP3 rings beyond 1
    sound = file_of(tone, "MP3")
    samples, rate = read(encode(sound))
    assert rate == RATE
    np.testing.assert_allclose(samples, read(sound)[0], atol=1e-6)
    assert np.abs(samples).max() > 1
    assert len(samples) == pytest.approx(RATE, rel=0.2)  # MP3 pads to whole frames
    assert np.abs(np.fft.rfft(samples[:RATE])).argmax() * RATE / min(RATE, len(samples)) == pytest.approx(440, abs=2)


def test_mp3_of_many_blocks_is_decoded_as_one(encode, read):
    """A frame of few bits leaves some to those after it, which a decoder that begins there does not have."""
    time_s = np.arange(10 * 44100) / 44100
    bursts = np.random.default_rng(0).uniform(-0.5, 0.5, len(time_s)) * (np.sin(2 * np.pi * 3 * time_s) > 0.5)
    sound = file_of(bursts, "MP3", rate=44100, bitrate_mode="VARIABLE", compression_level=0.9)
    assert len(bursts) > 5 * BLOCK_FRAMES
    np.testing.assert_allclose(read(encode(sound))[0], read(sound)[0], atol=1e-6)


def file_of_two_parts(loud_first):
    """An MP3 file of variable bit rate: a second of noise, and three of a quiet tone."""
    loud, quiet = np.random.default_rng(0).uniform(-0.5, 0.5, RATE), np.sin(np.arange(3 * RATE) / 13) / 10
    sound = np.concatenate([loud, quiet] if loud_first else [quiet, loud])
    return file_of(sound, "MP3", bitrate_mode="VARIABLE", compression_level=0.6)


@pytest.mark.parametrize("loud_first", [True, False])
@pytest.mark.parametrize("tail", ["whole", "cut", "tagged", "pictured"])
def test_mp3_that_was_written_to_a_pipe_is_decoded_to_its_end(tail, loud_first, encode, read):
    """It counts no frames, and libsndfile guesses their number by the bit rate of the first."""
    counted = file_of_two_parts(loud_first)
    assert b"Xing" in counted[:200]
    uncounted = piped(counted)
    assert soundfile.info(io.BytesIO(uncounted)).frames < 2 * RATE
    picture = np.random.default_rng(0).bytes(200_000)
    file = {
        "whole": uncounted,
        "cut": uncounted[:-50],
        "tagged": uncounted + b"APETAGEX" + bytes(3000),
        "pictured": uncounted + b"APETAGEX" + bytes(3000) + picture,
    }[tail]
    assert len(read(encode(file))[0]) == pytest.approx(4 * RATE, abs=1500)


@pytest.mark.parametrize("seconds", [3, 120])
def test_mp3_that_is_damaged_in_the_middle_is_refused(seconds, encode):
    sound = piped(mp3(seconds))
    middle = len(sound) // 3
    with pytest.raises(InvalidAudio, match="libsndfile cannot decode it"):
        encode(sound[:middle] + bytes(5000) + sound[middle:])


def test_what_is_late_is_read_no_further_and_not_sent(wav):
    sound = piped(mp3(120))
    damaged = sound[: len(sound) // 3] + bytes(5000) + sound[len(sound) // 3 :]
    for late in (damaged, wav):
        with pytest.raises(DeadlineExceeded, match="the clip was not read within"):
            encode_audio(late, Deadline(1e-9))


def mp3(seconds, rate=RATE, **options):
    return file_of(np.random.default_rng(0).uniform(-0.5, 0.5, seconds * rate), "MP3", rate=rate, **options)


PICTURE = b"ID3\4\0\0\0\x12\x27\x60" + np.random.default_rng(0).bytes(300_000)


@pytest.mark.parametrize(
    "joined",
    [
        mp3(3) + mp3(3),
        mp3(3) + mp3(3, 44_100),
        piped(mp3(3)) + piped(mp3(3, 44_100)),
        mp3(3) + mp3(1),
        mp3(3) + PICTURE + mp3(2),
    ],
    ids=["alike", "unlike", "uncounted", "short", "picture between"],
)
def test_of_mp3_files_one_behind_the_other_none_is_lost_silently(joined, encode):
    with pytest.raises(InvalidAudio, match=r"goes on behind its end, .* one behind the other, .*; convert the file"):
        encode(joined)


@pytest.mark.parametrize("between", [b"", PICTURE, b"TAG" + bytes(125)], ids=["nothing", "picture", "ID3v1"])
def test_of_flac_files_one_behind_the_other_none_is_lost_silently(noise, between, encode):
    flac = file_of(noise, "FLAC")
    bare = flac[:4] + b"\x80" + flac[5:42] + flac[-500:]  # without another block than the first
    for joined in (flac + between + flac, flac + between + bare, piped(flac) + between + piped(flac)):
        with pytest.raises(InvalidAudio, match=r"FLAC files one behind the other, .* send each by itself"):
            encode(joined)
    assert encode(flac + between) == flac + between


def test_wav_files_one_behind_the_other_are_refused_as_others_are(noise, encode):
    wav = file_of(noise, "WAV")
    with pytest.raises(InvalidAudio, match=r"WAV files one behind the other, .* send each by itself"):
        encode(wav + wav)


@pytest.mark.parametrize("rate", [8_000, 12_000])
def test_narrow_opus_is_decoded_here(noise, rate, encode, read):
    opus = file_of(noise, "OGG", "OPUS", rate=rate)
    sent = encode(opus)
    assert sent[:4] == b"RIFF"
    samples, sent_hz = read(sent)
    assert sent_hz == rate
    assert np.array_equal(samples, soundfile.read(io.BytesIO(opus), dtype="float32")[0])


def test_narrow_opus_that_cannot_be_decoded_here_goes_as_it_is(noise, encode, monkeypatch):
    opus = file_of(np.tile(noise, 8), "OGG", "OPUS", rate=8_000)
    pages = [b"OggS" + page for page in opus.split(b"OggS")[1:]]
    assert len(pages) > 4
    with_a_loss = b"".join([*pages[:-2], pages[-1]])
    assert encode(with_a_loss) == with_a_loss
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert encode(opus) == opus


@pytest.mark.parametrize(("codec", "rate"), [("VORBIS", RATE), ("OPUS", 48_000)])
def test_of_ogg_files_one_behind_the_other_none_is_lost_silently(noise, codec, rate, encode):
    ogg = file_of(noise, "OGG", codec, rate=rate)
    for joined in (ogg + file_of(noise, "OGG", codec, rate=rate), ogg + ogg, PICTURE + ogg + ogg):
        with pytest.raises(InvalidAudio, match=r"Ogg files one behind the other, .* send each by itself"):
            encode(joined)
    assert encode(ogg + bytes(100)) == ogg + bytes(100)


def test_ogg_that_the_server_refuses_is_decoded_here(noise, encode, read):
    sink = io.BytesIO()
    with soundfile.SoundFile(sink, "w", RATE, 1, format="OGG", subtype="VORBIS") as file:
        file.comment = "A" * 70_000  # so long that no packet ends on its first page
        file.write(noise)
    named = file_of(noise, "OGG", "VORBIS") + b"OggS" + bytes(30)
    for refused in (sink.getvalue(), named):
        sent = encode(refused)
        assert sent[:4] == b"RIFF"
        assert len(read(sent)[0]) == len(noise)


def test_mp3_is_decoded_without_a_copy_of_the_file():
    data = piped(mp3(3)) * 100
    tracemalloc.start()
    try:
        with open_audio(data) as source:
            assert sum(map(len, source.blocks())) == pytest.approx(300 * RATE, rel=0.1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(data) / 2


def test_mp3_files_that_make_one_are_one(encode, read):
    assert len(read(encode(piped(mp3(3)) * 2))[0]) == pytest.approx(6 * RATE, abs=3000)


@pytest.mark.parametrize(
    "tail",
    [b"", b"TAG" + bytes(125), PICTURE, b"\xff\xfb" * 1000, bytes(5000), mp3(3)[-300:], b"\xff" * 4000],
    ids=["none", "ID3v1", "picture", "syncs", "zeros", "a frame", "ones"],
)
def test_what_follows_an_mp3_file_and_is_none_does_no_harm(tail, encode, read):
    assert len(read(encode(mp3(3) + tail))[0]) == pytest.approx(3 * RATE, abs=100)


@pytest.mark.parametrize("flags", [0, 1])
def test_mp3_whose_header_has_no_count_is_decoded_to_its_end(flags, encode, read):
    sound = bytearray(file_of_two_parts(loud_first=False))
    place = sound.index(b"Xing")
    sound[place + 4 : place + 12] = struct.pack(">II", flags, 0)
    assert len(read(encode(bytes(sound)))[0]) == pytest.approx(4 * RATE, abs=1500)


@pytest.mark.parametrize("first", [-1, -257, -1025], ids=["layer I", "UTF-16", "layer III"])
def test_raw_samples_are_no_mp3(first, encode):
    """libsndfile would find frames in them, and the text would be that of noise, or empty."""
    raw = np.concatenate([[first, 0, 0], np.random.default_rng(0).integers(-99, 99, 60_000)]).astype("<i2").tobytes()
    assert soundfile.info(io.BytesIO(raw)).format == "MP3"
    with pytest.raises(InvalidAudio, match=r"no second frame follows; send .* `\(samples, rate\)`, or .*ffmpeg"):
        encode(raw)


@pytest.mark.parametrize("bit_rate", [0, 0.99], ids=["most", "least"])
@pytest.mark.parametrize("rate", [8000, 16000, 24000, 44100, 48000])
def test_mp3_of_every_kind_is_one(rate, bit_rate, encode, read):
    whole = mp3(1, rate, bitrate_mode="CONSTANT", compression_level=bit_rate)
    for sound in (whole, piped(whole)):
        assert len(read(encode(sound))[0]) == pytest.approx(rate, abs=3000)


@pytest.mark.parametrize("rate", [65537, 96153, 655360])
def test_a_rate_that_flac_has_not_is_kept(noise, rate, encode, read):
    file = file_of(noise, "AIFF", "PCM_16", rate)
    samples, sent_rate = read(encode(file))
    assert sent_rate == rate
    np.testing.assert_array_equal(samples, read(file)[0])


def test_a_small_file_may_not_fill_the_memory(monkeypatch, encode, read):
    monkeypatch.setattr("carnelian_client._audio.MAX_DECODED_BYTES", 4 * 2**20)
    whole = encode(file_of(np.zeros(2**20), "MP3"))
    assert len(read(whole)[0]) == 2**20
    with pytest.raises(InvalidAudio, match=r"at most 4 MiB of samples, but has more; `transcribe_long` .* cuts it"):
        encode(file_of(np.zeros(2**20 + RATE), "MP3"))


def test_what_a_header_claims_beyond_the_end_is_not_sent(encode, read):
    """An MP3 that is cut short, as by a download that broke off."""
    sound = mp3(40)
    cut = sound[: len(sound) // 3]
    assert soundfile.info(io.BytesIO(cut)).frames == 40 * RATE
    assert len(read(encode(cut))[0]) == pytest.approx(40 * RATE / 3, rel=0.1)


def test_formats_without_a_length_are_read(noise, encode, read):
    samples, rate = read(encode(file_of(noise, "AU", "G721_32")))
    assert rate == RATE
    assert len(samples) >= len(noise)


def test_without_soundfile_the_error_says_how_to_install_it(monkeypatch, encode):
    data = file_of(np.zeros(1000), "MP3")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InvalidAudio, match=r"install soundfile \(`pip install soundfile`\) for MP3"):
        encode(data)


def test_what_nobody_reads_is_refused_with_advice(tmp_path, encode):
    path = tmp_path / "notes.txt"
    path.write_text("hello world")
    with pytest.raises(InvalidAudio, match=r"libsndfile cannot decode it \(Format not recognised\.\); .*ffmpeg"):
        encode(path)


def test_damaged_files_are_refused_in_silence(noise, encode, capfd):
    """Of an AIFF without samples, libsndfile seeks them before the beginning: Python wrote an error of its own."""
    with pytest.raises(InvalidAudio, match="libsndfile cannot decode it"):
        encode(file_of(noise, "AIFF", "PCM_16").replace(b"SSND", b"JUNK"))
    assert capfd.readouterr() == ("", "")


def test_midi_sample_dumps_are_refused(noise, encode, capfd):
    """libsndfile wrote what damaged ones hold to the standard output, among a command's transcripts."""
    whole = file_of(noise, "SDS", "PCM_16")
    for dump in (whole, whole[:40] + bytes(len(whole) - 40)):
        with pytest.raises(InvalidAudio, match="a MIDI sample dump is not read; convert the file"):
            encode(dump)
    assert capfd.readouterr() == ("", "")


def test_a_file_of_another_format_without_samples_is_invalid(encode):
    with pytest.raises(InvalidAudio, match="no samples, or none that its header counts; convert"):
        encode(file_of(np.zeros(0), "AU", "PCM_16"))


@pytest.mark.parametrize("audio", [None, 7, ["a.wav"], (np.zeros(3),)])
def test_other_types_are_the_callers_mistake(audio, encode):
    with pytest.raises(TypeError, match="must be"):
        encode(audio)


@pytest.mark.parametrize(
    ("audio", "advice"),
    [
        (io.BytesIO(b"RIFF"), r"but is BytesIO; pass the bytes that its `read\(\)` gives"),
        (np.zeros(3), "but is ndarray; pass samples with their rate, or a file's bytes"),
        (array.array("B", b"RIFF"), r"but is array; .* which its `tobytes\(\)` gives"),
    ],
    ids=["file", "samples", "bytes"],
)
def test_what_can_become_audio_is_refused_with_how(audio, advice, encode):
    with pytest.raises(TypeError, match=advice):
        encode(audio)


def test_a_request_that_no_server_takes_is_not_sent(monkeypatch, wav, encode):
    monkeypatch.setattr("carnelian_client._audio.MAX_BYTES", 100)
    with pytest.raises(InvalidAudio, match="at most 100 bytes"):
        encode(wav)
    with pytest.raises(InvalidAudio, match="at most 100 bytes, but has 40"):
        encode(file_of(np.zeros(1000), "AIFF", "FLOAT"))
