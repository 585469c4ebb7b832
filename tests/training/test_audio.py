"""Files that need care before DALI decodes them: MP3, segments, absurd lengths. The others: test_containers.py."""

import io
import unicodedata

import numpy as np
import pytest
import soundfile
import torch
from carnelian_training.data.audio import encoded, error_words
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.features import FeatureSettings


def test_a_segment_is_what_it_cuts_out(tmp_path):
    sound = np.random.default_rng(0).standard_normal((88200, 2)).astype(np.float32) * 0.1
    for format_ in ("wav", "flac"):
        soundfile.write(tmp_path / f"long.{format_}", sound, 44100)
        soundfile.write(tmp_path / f"cut.{format_}", sound[22050:66150], 44100)
        segment = Clip(tmp_path / f"long.{format_}", 1.0, "a", offset=0.5)
        cut = Clip(tmp_path / f"cut.{format_}", 1.0, "a")
        (batch,) = load([[Item(segment), Item(cut)]], FeatureSettings(), 1)
        assert batch.lengths.tolist() == [101, 101]
        torch.testing.assert_close(batch.features[0], batch.features[1])


@pytest.mark.parametrize("subtype", ["GSM610", "G721_32", "IMA_ADPCM", "ULAW"])
def test_a_segment_of_a_telephone_call_is_what_the_whole_file_has_there(tmp_path, subtype):
    """In some of their codecs libsndfile cannot jump, and no segment was read."""
    path = tmp_path / "call.wav"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.1, 0.1, 160_000), 8000, subtype=subtype)
    whole, _ = soundfile.read(path, dtype="float32")
    for offset in (0.0, 1.0, 17.5):
        data = encoded(Clip(path, 2.0, "a", offset=offset))
        samples, rate_hz = soundfile.read(io.BytesIO(data.tobytes()), dtype="float32")
        assert rate_hz == 8000
        np.testing.assert_array_equal(samples, whole[round(8000 * offset) :][:16_000])


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Format not recognised; it begins with b'version https://'"),
        (b"RIFF\x24\0\0\0WAVEfmt \0\0\0\0", "Short 'fmt ' chunk; it begins with"),
    ],
)
def test_a_file_that_libsndfile_cannot_read_is_described_and_to_be_converted(tmp_path, content, words, offset):
    (tmp_path / "a.wav").write_bytes(content + bytes(100))
    with pytest.raises(RuntimeError, match=rf"{words}.*; if that is sound, convert it: `ffmpeg .* out.flac`$"):
        encoded(Clip(tmp_path / "a.wav", 2.0, "a", offset=offset))


@pytest.mark.parametrize("offset", [None, 1.0])
def test_a_midi_sample_dump_is_left_out(tmp_path, offset, capfd):
    """libsndfile wrote what damaged ones hold to the standard output."""
    soundfile.write(tmp_path / "a.sds", np.zeros(32_000), 16_000, format="SDS")
    with pytest.raises(RuntimeError, match="is a MIDI sample dump, which is not read; convert it"):
        encoded(Clip(tmp_path / "a.sds", 2.0, "a", offset=offset))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("offset", [None, 1.0])
def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path, offset):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*call\.wav") as error:
        encoded(Clip(tmp_path / "call.wav", 2.0, "a", offset=offset))
    assert error_words(error.value) == "No such file or directory"  # a report names the file itself


def test_a_name_with_its_accents_in_another_form_is_told_from_a_missing_file(tmp_path):
    for folder, name, form in (("Mu\u0308ll", "u\u0308bung.wav", "NFC"), ("\u00d6l", "\u00fcbung.wav", "NFD")):
        there = tmp_path / unicodedata.normalize(form, folder) / unicodedata.normalize(form, name)
        there.parent.mkdir(parents=True)
        soundfile.write(there, np.zeros(16_000), 16_000)
        with pytest.raises(FileNotFoundError, match=f"it is there with its accents in the form {form}"):
            encoded(Clip(tmp_path / folder / name, 1.0, "a"))


def test_a_path_of_windows_is_told_from_a_missing_file(tmp_path):
    (tmp_path / "clips").mkdir()
    soundfile.write(tmp_path / "clips" / "a.wav", np.zeros(16_000), 16_000)
    with pytest.raises(FileNotFoundError, match="it is there with / for each backslash"):
        encoded(Clip(tmp_path / "clips\\a.wav", 1.0, "a"))


def test_mp3_files_are_read(tmp_path):
    tone = np.sin(2 * np.pi * 440 * np.arange(66150) / 22050).astype(np.float32) * 0.5
    for name in ("tone.mp3", "tone.wav"):
        soundfile.write(tmp_path / name, tone, 22050)
    mp3, wav = (Item(Clip(tmp_path / name, 3.0, "a")) for name in ("tone.mp3", "tone.wav"))
    (batch,) = load([[mp3, wav]], FeatureSettings(), 1)
    assert batch.lengths[0] == pytest.approx(batch.lengths[1], abs=2)
    (tmp_path / "text.mp3").write_text("no sound")
    with pytest.raises(RuntimeError, match=r"text\.mp3: "):
        list(load([[Item(Clip(tmp_path / "text.mp3", 3.0, "a"))]], FeatureSettings(), 1))


@pytest.mark.parametrize("tag", [b"", b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)])
def test_an_mp3_file_may_have_another_name(tmp_path, tag):
    soundfile.write(tmp_path / "tone.mp3", np.sin(np.arange(32000) / 10) * 0.5, 16000)
    (tmp_path / "tone.wav").write_bytes(tag + (tmp_path / "tone.mp3").read_bytes())
    (batch,) = load([[Item(Clip(tmp_path / "tone.wav", 2.0, "a"))]], FeatureSettings(), 1)
    assert batch.lengths.item() == pytest.approx(201, abs=12)  # MP3 pads to whole frames


WAV_OF_MP3 = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x55\0" + bytes(14)
DATA = b"data\xff\xff\xff\xff"
HEADERS = {
    "bare": b"",
    "in wav": WAV_OF_MP3 + DATA,
    "in wav behind zeros": WAV_OF_MP3 + DATA + bytes(40),
    "in wav behind much else": WAV_OF_MP3 + b"bext\0\0\2\0" + bytes(1 << 17) + DATA,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("offset", [1.0, 5.0, 18.0])
def test_a_segment_of_mp3_that_was_written_to_a_pipe_is_what_the_whole_file_has_there(tmp_path, offset, header):
    """At the bit rate of its loud beginning libsndfile would guess that it ends after 4 s."""
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, 320_000) * np.repeat([1, 1e-4], [32_000, 288_000])
    path = tmp_path / "pipe.mp3"
    soundfile.write(path, sound, 16_000, bitrate_mode="VARIABLE", compression_level=0.5)
    data = path.read_bytes()
    path.write_bytes(data[data.index(data[:2], 4) :])
    assert soundfile.info(path).duration < 5
    path.write_bytes(header + path.read_bytes())
    whole, _ = soundfile.read(io.BytesIO(encoded(Clip(path, 20.0, "a")).tobytes()), dtype="float32")
    found, _ = soundfile.read(io.BytesIO(encoded(Clip(path, 1.0, "a", offset=offset)).tobytes()), dtype="float32")
    begin = round(offset * 16_000)
    np.testing.assert_allclose(found, whole[begin : begin + 16_000], atol=1e-6)


def test_a_segment_of_an_mp3_file_is_what_the_whole_file_has_there(tmp_path):
    """Where a decoder begins, it lacks the bits that frames before it kept for those after."""
    noise = np.cumsum(np.random.default_rng(0).standard_normal(128_000)) * (1 + np.sin(np.arange(128_000) / 3000))
    path = tmp_path / "long.mp3"
    sound = 0.5 * (noise - noise.mean()) / np.abs(noise).max()
    soundfile.write(path, sound, 16_000, bitrate_mode="VARIABLE", compression_level=0.9)
    whole, _ = soundfile.read(path, dtype="float32")
    for offset in np.arange(0.5, 7, 0.37):
        found, _ = soundfile.read(io.BytesIO(encoded(Clip(path, 0.5, "a", offset=offset)).tobytes()), dtype="float32")
        begin = round(offset * 16_000)
        np.testing.assert_allclose(found, whole[begin : begin + 8000], atol=1e-6)  # 0.35 was seen


@pytest.mark.parametrize("seconds", [20, 70])
def test_a_segment_at_the_end_of_ogg_vorbis_is_what_the_whole_file_has_there(tmp_path, seconds):
    """Within the last page, libsndfile goes to up to 511 frames behind the place; of near silence it lasts 8 s."""
    path = tmp_path / "long.ogg"
    soundfile.write(path, np.random.default_rng(0).uniform(-1e-4, 1e-4, seconds * 16_000), 16_000)
    whole, _ = soundfile.read(path, dtype="float32")
    for begin in range(len(whole) - 4000, len(whole), 250):
        clip = Clip(path, (len(whole) - begin) / 16_000, "a", offset=begin / 16_000)
        found, _ = soundfile.read(io.BytesIO(encoded(clip).tobytes()), dtype="float32")
        np.testing.assert_allclose(found, whole[begin:], atol=1e-6)


def test_hours_of_sound_behind_a_short_line_are_not_decoded(tmp_path):
    """A batch of such files would fill the memory before any is found to be too long."""
    for name, frames in (("fine.wav", 61 * 8000), ("hours.wav", 62 * 8000), ("hours.mp3", 62 * 8000)):
        soundfile.write(tmp_path / name, np.zeros(frames), 8000)
    assert encoded(Clip(tmp_path / "fine.wav", 1.0, "a")).size == 61 * 16_000 + 44
    for name in ("hours.wav", "hours.mp3"):
        with pytest.raises(RuntimeError, match=r"over 60 s longer than the 1\.00 s of its.*; a stretch .*`offset`"):
            encoded(Clip(tmp_path / name, 1.0, "a"))


@pytest.mark.parametrize("claim", [2**33, 2**61, 2**62 + 10_312, 2**63 - 1, 2**64 - 5])
def test_a_claim_that_would_overflow_dali_s_memory_is_refused_before_dali_sees_it(tmp_path, claim):
    path = tmp_path / "forged.ogg"
    soundfile.write(path, np.zeros(96_000), 48_000, subtype="OPUS")
    data = bytearray(path.read_bytes())
    last = data.rfind(b"OggS")
    data[last + 6 : last + 14] = claim.to_bytes(8, "little")
    data[last + 22 : last + 26] = bytes(4)
    data[last + 22 : last + 26] = _ogg_checksum(data[last:]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"over 60 s longer|SF_INFO struct incomplete"):
        encoded(Clip(path, 2.0, "a"))


def _ogg_checksum(page):
    remainder = 0
    for byte in page:
        remainder ^= byte << 24
        for _ in range(8):
            remainder = ((remainder << 1) ^ (0x04C11DB7 if remainder >> 31 else 0)) & 0xFFFFFFFF
    return remainder


def unmeasured(data):
    """An MP3 file whose first frame does not count the others, and which breaks off in its last one."""
    flags = max(data.find(b"Xing"), data.find(b"Info")) + 4
    return data[:flags] + bytes(4) + data[flags + 4 : -50]


FORMS = {
    "mp3 without a count, cut short": ("MP3", "a.mp3", unmeasured),
    "flac that is called raw": ("FLAC", "a.raw", bytes),
    "ogg behind a tag": ("OGG", "a.ogg", lambda data: b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + data),
    "wav that was never closed": ("WAV", "a.wav", lambda data: data[:4] + bytes(4) + data[8:40] + bytes(4) + data[44:]),
}


@pytest.mark.parametrize(("format_", "name", "form"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("duration", [1.0, 5.0])  # the second one lasts longer than the file
def test_a_segment_of_a_file_that_must_be_repaired_is_what_the_whole_file_has_there(
    tmp_path, format_, name, form, duration
):
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, 10 * 16_000)
    file = io.BytesIO()
    soundfile.write(file, noise, 16_000, format=format_)
    path = tmp_path / name
    path.write_bytes(form(file.getvalue()))
    whole, segment = (
        soundfile.read(io.BytesIO(encoded(Clip(path, seconds, "a", offset=offset)).tobytes()))[0]
        for seconds, offset in ((10.0, None), (duration, 8.0))
    )
    rest = whole[8 * 16_000 :]
    # The decoder may give the last frame of an MP3 to the one and not to the other.
    assert abs(len(segment) - min(len(rest), round(duration * 16_000))) < 576
    size = min(len(rest), len(segment))
    np.testing.assert_allclose(segment[:size], rest[:size], atol=2e-4)
