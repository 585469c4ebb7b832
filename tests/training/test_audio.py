"""Formats that need care before DALI decodes them: MP3, FLAC out of a pipe, segments."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from carnelian_training.data.audio import encoded
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.features import FeatureSettings

DEMO_CLIPS = Path(__file__).parents[2] / "demo" / "clips"


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
def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path, offset):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*call\.wav"):
        encoded(Clip(tmp_path / "call.wav", 2.0, "a", offset=offset))


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


def test_mp3_whose_length_libsndfile_would_guess_is_refused(tmp_path):
    """Without the header in front, as after a pipe, a third of speech is cut off without a word."""
    speech, rate_hz = soundfile.read(DEMO_CLIPS / "letter.wav")
    for mode in ("VARIABLE", "CONSTANT"):
        whole = tmp_path / f"{mode}.mp3"
        soundfile.write(whole, speech, rate_hz, bitrate_mode=mode, compression_level=0.5)
        sound = whole.read_bytes()
        first_frame = sound.index(sound[:2], 4)
        (tmp_path / f"{mode}_pipe.mp3").write_bytes(sound[first_frame:])
    lines = [("VARIABLE", None), ("CONSTANT", None), ("CONSTANT_pipe", None)]
    clips = [Clip(tmp_path / f"{name}.mp3", 3.6, "a", offset=offset) for name, offset in lines]
    (batch,) = load([[Item(clip) for clip in clips]], FeatureSettings(), 1)
    assert min(batch.lengths) >= 360
    for offset in (None, 1.0):
        piped = Item(Clip(tmp_path / "VARIABLE_pipe.mp3", 1.0, "a", offset=offset))
        with pytest.raises(RuntimeError, match=r"must say how long it is.*: libsndfile.*`ffmpeg -i IN OUT\.flac`"):
            list(load([[piped]], FeatureSettings(), 1))


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


def test_flac_that_was_written_to_a_pipe_is_refused_before_dali_sees_it(tmp_path):
    path = tmp_path / "piped.flac"
    soundfile.write(path, np.zeros(1600), 16_000)
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"FLAC must count its samples.*`ffmpeg -i IN OUT\.flac`"):
        encoded(Clip(path, 0.1, "a"))
