import logging
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from carnelian_training.synthesis import engines, voices
from carnelian_training.synthesis.utterances import find_fault
from carnelian_training.text import to_labels


def skip_unless_installed(engine, speaker):
    if (hint := engine.install_hint(speaker)) is not None:
        pytest.skip(f"not installed: {hint}")


def test_an_engine_names_all_its_voices(monkeypatch):
    monkeypatch.setattr(engines.Flite, "install_hint", staticmethod(lambda speaker: None))
    assert [voice.name for voice in voices.choose_voices(["flite"])] == [
        f"flite-{speaker}" for speaker in ("slt", "rms", "awb", "kal16")
    ]


def test_an_unknown_voice_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"one of hibari, pico-us.*found 'nobody'"):
        voices.choose_voices(["nobody"])


def test_no_name_of_a_voice_is_refused():
    with pytest.raises(ValueError, match="one voice must be named at least, found none"):
        voices.choose_voices([])


def test_a_pattern_chooses_among_the_speakers_of_a_voice(monkeypatch):
    for engine in (engines.Espeak, engines.Flite, engines.Kokoro):
        monkeypatch.setattr(engine, "install_hint", staticmethod(lambda speaker: None))
    espeak, kokoro = voices.choose_voices(["espeak:en-gb*", "kokoro:b?_*+b?_*"])
    assert {speaker.partition("+")[0] for speaker in espeak.speakers} == {
        "en-gb",
        "en-gb-x-rp",
        "en-gb-scotland",
        "en-gb-x-gbclan",
    }
    assert len(kokoro.speakers) == 8 * 9 / 2
    assert [voice.name for voice in voices.choose_voices(["flite:[as]*"])] == ["flite-slt", "flite-awb"]
    assert voices.choose_voices(["flite", "flite-slt"]) == voices.choose_voices(["flite"])
    with pytest.raises(ValueError, match=r"one speaker of espeak at least, such as en-us\+m1, en-gb\+m4, .*'fr\*'"):
        voices.choose_voices(["espeak:fr*"])
    with pytest.raises(ValueError, match=r"one pattern of its speakers.*\['espeak'\]"):
        voices.choose_voices(["espeak", "espeak:en-us*"])


def test_a_voice_that_was_named_must_be_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="flite-slt: apt-get install flite"):
        voices.choose_voices(["flite-slt"])


def test_a_voice_that_was_not_named_is_left_out_with_advice(monkeypatch, caplog):
    monkeypatch.setattr(engines.Flite, "install_hint", staticmethod(lambda speaker: "apt-get install flite"))
    monkeypatch.setattr(engines.Espeak, "install_hint", staticmethod(lambda speaker: None))
    with caplog.at_level(logging.WARNING):
        found = {voice.name for voice in voices.choose_voices(None)}
    assert "espeak" in found
    assert "flite-slt" not in found
    assert "flite-slt: apt-get install flite" in caplog.text


@pytest.mark.parametrize("voice", voices.VOICES, ids=lambda voice: voice.name)
def test_a_voice_speaks(voice):
    speaker = voice.speakers[0]
    skip_unless_installed(engines.ENGINES[voice.engine], speaker)
    text = "The old man had forty-two horses, and none of them was white."
    speech = voices.render(voice, text, speaker, 1.0, 1.0, 3)
    assert speech.dtype == np.float32
    assert find_fault(speech, to_labels(text)) is None


@pytest.mark.parametrize("voice", voices.VOICES, ids=lambda voice: voice.name)
def test_a_voice_keeps_to_the_speed_whatever_the_pitch(voice):
    speaker = voice.speakers[0]
    skip_unless_installed(engines.ENGINES[voice.engine], speaker)
    if voice.speed == (1.0, 1.0):
        pytest.skip(f"{voice.name} has one speed")
    text = "The old man had forty-two horses, and none of them was white."
    slow, fast = (len(voices.render(voice, text, speaker, speed, 1.0, 3)) for speed in (0.7, 1.4))
    assert 1.4 < slow / fast < 2.6
    low, high = (len(voices.render(voice, text, speaker, 1.0, pitch, 3)) for pitch in voice.pitch)
    if voice.engine != "piper":  # which draws the lengths of its sounds
        # Engines hold to a speed but roughly, at the ends of a sentence above all: the pitches differ by 35 %.
        assert low == pytest.approx(high, rel=0.2)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_a_lower_pitch_lowers_the_voice():
    [voice] = voices.choose_voices(["espeak"])
    text = "We were all away a year ago."
    heights = [
        pitch_hz(voices.render(voice, text, "en-us+m3", 1.0, pitch, 0)) for pitch in (voice.pitch[0], voice.pitch[1])
    ]
    assert heights[0] < heights[1]


def test_two_kokoro_speakers_make_a_third_between_them():
    skip_unless_installed(engines.Kokoro, "af_bella")
    [voice] = voices.choose_voices(["kokoro"])
    text = "We were all away a year ago."
    low, middle, high = (
        pitch_hz(voices.render(voice, text, speaker, 1.0, 1.0, 0))
        for speaker in ("am_adam+am_adam", "af_bella+am_adam", "af_bella+af_bella")
    )
    assert low < middle < high


def test_workers_put_kokoros_model_together_one_at_a_time(tmp_path, monkeypatch):
    skip_unless_installed(engines.Kokoro, "bf_emma")
    monkeypatch.setenv("KOKORO_JA_CACHE", str(tmp_path))
    [voice] = voices.choose_voices(["kokoro"])
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        how = "A year ago.", "bf_emma+bf_emma", 1.0, 1.0, 0
        one, other = (pool.submit(voices.render, voice, *how) for _ in range(2))
        assert np.array_equal(one.result(), other.result())


def test_british_kokoro_speakers_speak_british_english():
    skip_unless_installed(engines.Kokoro, "bf_emma")
    kokoro = engines.Kokoro()
    text = "A man's father can't afford the better car, or a castle, Elizondo."
    american, british = (kokoro._pronounce(text, speaker) for speaker in ("am_adam+jf_alpha", "am_adam+bf_emma"))
    assert american == "ɐ mˈænz fˈɑðəɹ kˈænt əfˈɔɹd ðə bˈɛTəɹ kˈɑɹ, ɔɹ ɐ kˈæsᵊl, ᵻlɪzˈɑndO."
    assert british == "ɐ mˈænz fˈɑːðə kˈɑːnt əfˈɔːd ðə bˈɛtə kˈɑː, ɔː ɐ kˈɑːsᵊl, ᵻlɪzˈɑndO."
    # Words and sounds that are not one to one.
    assert kokoro._pronounce("It cost $5.", "bf_emma+bf_emma") == "ˌɪt kˈɔst fˈIv dˈɑləɹz."


def pitch_hz(speech):
    """The strongest period of the whole clip between 60 and 400 Hz."""
    spectrum = np.abs(np.fft.rfft(speech, 2 * len(speech))) ** 2
    correlation = np.fft.irfft(spectrum)
    shortest, longest = 16000 // 400, 16000 // 60
    return 16000 / (shortest + int(np.argmax(correlation[shortest:longest])))
