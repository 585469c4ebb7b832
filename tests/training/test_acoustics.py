import dataclasses
import os
import random
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from carnelian_training.config import AugmentConfig, NoiseConfig, ReverberationConfig
from carnelian_training.config_errors import ConfigError
from carnelian_training.data import acoustics
from carnelian_training.data.acoustics import (
    NO_NOISE,
    NO_ROOM,
    UNDISTURBED,
    Disturbance,
    Sounds,
    disturb,
    find_sounds,
    read_noise,
    read_room,
    to_mono_16khz,
)
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.data.plan import Item, plan_epoch
from carnelian_training.features import FeatureSettings


@pytest.fixture
def sounds(tmp_path):
    """Two noises, one of them at 44.1 kHz in stereo, and a room whose direct sound comes late."""
    white = np.random.default_rng(0).standard_normal((44100, 2)).astype(np.float32) * 0.1
    (tmp_path / "noise" / "deeper").mkdir(parents=True)
    soundfile.write(tmp_path / "noise" / "wide.wav", white, 44100)
    soundfile.write(tmp_path / "noise" / "deeper" / "narrow.flac", white[:8000, 0], 16000)
    room = np.zeros(4000, np.float32)
    room[100], room[1700] = 0.8, 0.4
    (tmp_path / "rooms").mkdir()
    soundfile.write(tmp_path / "rooms" / "hall.wav", room, 16000)
    return tmp_path


def test_noise_comes_at_its_ratio_and_is_repeated_to_the_end(sounds):
    signal = np.sin(np.arange(48000) / 5).astype(np.float32)
    noise = read_noise(sounds / "noise" / "wide.wav", 0.5, 1.0)
    assert 16000 <= len(noise) < 48000
    added = disturb(signal, NO_ROOM, noise, Disturbance(snr_db=12)) - signal
    assert 10 * np.log10(np.mean(signal**2) / np.mean(added**2)) == pytest.approx(12, abs=0.01)
    assert added[-1000:].std() > 0


def test_noise_begins_where_it_was_drawn_to(sounds):
    path = sounds / "noise" / "deeper" / "narrow.flac"
    whole, _ = soundfile.read(path, dtype="float32")
    noise = read_noise(path, 0.25, 1.0)
    np.testing.assert_array_equal(noise, np.roll(whole, -2000))
    beginning = read_noise(path, 0.25, 0.1)
    np.testing.assert_array_equal(beginning, whole[2000:5200])


def test_hardly_any_noise_is_read_once(tmp_path):
    soundfile.write(tmp_path / "click.wav", np.full(1, 0.5), 16000)
    noise = read_noise(tmp_path / "click.wav", 0.5, 10.0)
    np.testing.assert_array_equal(noise, [0.5])
    np.testing.assert_array_equal(disturb(np.full(5, 0.25, np.float32), NO_ROOM, noise, UNDISTURBED), np.full(5, 0.5))


def test_noises_may_be_mp3_files(tmp_path):
    soundfile.write(tmp_path / "a.MP3", np.random.default_rng(0).standard_normal(44100) * 0.1, 44100)
    (path,) = Sounds.find(AugmentConfig(noise=NoiseConfig(path=tmp_path))).noises
    noise = read_noise(path, 0.7, 2.0)
    assert len(noise) >= 16000
    assert noise.std() > 0.01


def test_a_room_neither_shifts_nor_lengthens(sounds):
    signal = np.zeros(8000, np.float32)
    signal[1000] = 1.0
    heard = disturb(signal, read_room(sounds / "rooms" / "hall.wav"), NO_NOISE, UNDISTURBED)
    assert len(heard) == len(signal)
    assert np.abs(heard).argmax() == 1000
    assert heard[2600] / heard[1000] == pytest.approx(0.5, abs=1e-3)


def test_an_echo_beyond_the_end_is_not_heard_at_the_start(sounds):
    signal = np.zeros(8192, np.float32)
    signal[8000] = 1.0
    heard = disturb(signal, read_room(sounds / "rooms" / "hall.wav"), NO_NOISE, UNDISTURBED)
    np.testing.assert_allclose(heard[:8000], 0, atol=1e-6)


def test_gain_is_in_decibels():
    heard = disturb(np.ones(10, np.float32), NO_ROOM, NO_NOISE, Disturbance(gain_db=-20))
    np.testing.assert_allclose(heard, 0.1, rtol=1e-6)


@pytest.mark.parametrize("samples", [0, 1])
def test_hardly_any_signal_stays_finite(samples, sounds):
    room = read_room(sounds / "rooms" / "hall.wav")
    heard = disturb(np.zeros(samples, np.float32), room, np.ones(5, np.float32), UNDISTURBED)
    assert heard.shape == (samples,)
    assert np.isfinite(heard).all()


def augmented(tiny_config, sounds, noise, reverberation):
    augment = AugmentConfig(
        speed_probability=0.0,
        noise=NoiseConfig(path=sounds / "noise", probability=noise, snr_db=(0.0, 10.0)),
        reverberation=ReverberationConfig(path=sounds / "rooms", probability=reverberation),
    )
    return dataclasses.replace(tiny_config, augment=augment)


def test_the_probabilities_are_those_that_happen(tiny_config, sounds):
    config = augmented(tiny_config, sounds, 0.3, 0.6)
    config = dataclasses.replace(config, augment=dataclasses.replace(config.augment, gain_db=(-6.0, 3.0)))
    clips = [Clip(sounds, 2.0, "a")] * 4000
    drawn = [item.disturbance for batch in plan_epoch(clips, config, 0) for item in batch]
    assert np.mean([d.noise is not None for d in drawn]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([d.room is not None for d in drawn]) == pytest.approx(0.6, abs=0.03)
    loud = np.array([d.gain_db for d in drawn])
    snr_db = np.array([d.snr_db for d in drawn if d.noise is not None])
    for values, low, high in ((loud, -6.0, 3.0), (snr_db, 0.0, 10.0)):
        assert low <= values.min() < low + 0.1 < high - 0.1 < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.4)
    both = np.mean([d.noise is not None and d.room is not None for d in drawn])
    assert both == pytest.approx(0.18, abs=0.03)
    assert len({d.noise for d in drawn}) == 3


def test_training_hears_the_disturbance_and_the_same_one_each_time(tiny_config, sounds):
    clips = read_manifest(tiny_config.data.train[0].path)[:3]
    plan = plan_epoch(clips, augmented(tiny_config, sounds, 1.0, 1.0), 0)
    first, again = ([batch.features for batch in load(plan, FeatureSettings(), 1)] for _ in range(2))
    clean = [
        batch.features for batch in load([[Item(item.clip) for item in items] for items in plan], FeatureSettings(), 1)
    ]
    for disturbed, same, undisturbed in zip(first, again, clean, strict=True):
        np.testing.assert_array_equal(disturbed, same)
        assert disturbed.shape == undisturbed.shape
        assert (disturbed - undisturbed).abs().mean() > 0.1


def test_epochs_leave_no_threads_behind(tiny_config, sounds):
    clips = read_manifest(tiny_config.data.train[0].path)[:3]
    plan = plan_epoch(clips, augmented(tiny_config, sounds, 1.0, 1.0), 0)
    counts = []
    for _ in range(8):
        deque(load(plan, FeatureSettings(), 3), maxlen=0)
        counts.append(threading.active_count())
    assert counts[-1] < counts[0] + 3  # a pool of three starts its threads as it needs them


def test_dither_is_drawn_per_clip_and_epoch_and_never_in_evaluation(tiny_config):
    config = dataclasses.replace(tiny_config, augment=AugmentConfig(speed_probability=0.0, dither=0.01))
    clips = read_manifest(tiny_config.data.train[0].path)
    first, again, later = (
        {item.clip: item.disturbance for batch in plan_epoch(clips, config, epoch) for item in batch}
        for epoch in (0, 0, 1)
    )
    assert first == again != later
    assert {disturbance.dither for disturbance in first.values()} == {0.01}
    silence = np.zeros(100_000, np.float32)
    drawn = (Disturbance(dither=0.01, dither_seed=seed) for seed in (1, 1, 2))
    one, same, other = (disturb(silence, NO_ROOM, NO_NOISE, disturbance) for disturbance in drawn)
    np.testing.assert_array_equal(one, same)
    assert one.std() == pytest.approx(0.01, rel=0.01)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    (dithered,) = load([[Item(clips[0], disturbance=first[clips[0]])]], FeatureSettings(), 1)
    (clean,) = load([[Item(clips[0])]], FeatureSettings(), 1)  # as evaluation makes them
    assert 0.01 < (dithered.features - clean.features).abs().mean() < 2


@pytest.mark.parametrize("content", [b"no sound", b""])
def test_a_broken_noise_or_room_is_named_once_and_clips_go_without(tiny_config, sounds, content, caplog):
    (sounds / "noise" / "wide.wav").unlink()
    (sounds / "noise" / "deeper" / "narrow.flac").write_bytes(content)
    soundfile.write(sounds / "rooms" / "hall.wav", np.zeros(100), 16000)
    clips = read_manifest(tiny_config.data.train[0].path)
    plan = plan_epoch(clips, augmented(tiny_config, sounds, 1.0, 1.0), 0)
    clean = [[Item(item.clip) for item in items] for items in plan]
    loaded = (load(items, FeatureSettings(), 1, training=tiny_config) for items in (plan, clean))
    for heard, undisturbed in zip(*loaded, strict=True):
        assert [item.clip for item in heard.items] == [item.clip for item in undisturbed.items]
        torch.testing.assert_close(heard.features, undisturbed.features)
    assert caplog.text.count("narrow.flac must be a sound file") == 1
    assert caplog.text.count("hall.wav must be an impulse response") == 1


def test_noises_of_a_batch_are_read_at_once_and_a_broken_one_is_named_once(tiny_config, monkeypatch, caplog):
    both = threading.Barrier(2)

    def read(path, start, duration_s):
        both.wait(timeout=60)
        raise ConfigError(f"{path} must be a sound file")

    monkeypatch.setattr(acoustics, "read_noise", read)
    items = [
        Item(clip, disturbance=Disturbance(noise=Path("a.wav")))
        for clip in read_manifest(tiny_config.data.train[0].path)[:2]
    ]
    (batch,) = load([items], FeatureSettings(), 2)
    assert batch.items == items
    assert caplog.messages == ["a.wav must be a sound file; going on without it"]


def test_empty_noise_and_silent_rooms_are_refused(tmp_path):
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16000)
    soundfile.write(tmp_path / "short.wav", np.ones(1), 48000)
    soundfile.write(tmp_path / "silent.wav", np.zeros(100), 16000)
    for name in ("empty.wav", "short.wav"):
        with pytest.raises(ConfigError, match="must hold finite samples, one at 16 kHz at least"):
            read_noise(tmp_path / name, 0.0, 1.0)
    with pytest.raises(ConfigError, match="must be an impulse response"):
        read_room(tmp_path / "silent.wav")


def test_noise_that_is_not_finite_is_refused(tmp_path):
    soundfile.write(tmp_path / "nan.wav", np.full(1600, np.nan, np.float32), 16000, subtype="FLOAT")
    with pytest.raises(ConfigError, match="must hold finite samples"):
        read_noise(tmp_path / "nan.wav", 0.0, 1.0)


def test_a_sound_in_the_place_of_a_folder_of_sounds_is_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(1600), 16000)
    with pytest.raises(ConfigError, match=r"a\.wav must be a folder of sound files, but is a file: give its folder"):
        Sounds.find(AugmentConfig(noise=NoiseConfig(path=tmp_path / "a.wav")))


def test_a_folder_without_sounds_is_refused(tmp_path):
    config = AugmentConfig(noise=NoiseConfig(path=tmp_path))
    with pytest.raises(ConfigError, match="must hold sound files"):
        Sounds.find(config)


def test_links_to_folders_are_followed_once_and_in_one_order(tmp_path, monkeypatch):
    """A corpus is linked to rather than copied, and links may lead in a circle."""
    corpus, noise = tmp_path / "corpus", tmp_path / "noise"
    corpus.mkdir()
    noise.mkdir()
    (corpus / "a.wav").touch()
    (noise / "c.wav").touch()
    (noise / "circle").symlink_to(noise)
    for name in ("m", "n"):
        (noise / name).symlink_to(corpus)
    walk = os.walk

    def backwards(*arguments, **options):
        for place, folders, names in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield place, folders, names

    monkeypatch.setattr(os, "walk", backwards)
    assert find_sounds(noise) == (noise / "c.wav", noise / "m" / "a.wav")


def test_every_room_is_drawn(tmp_path):
    config = AugmentConfig(reverberation=ReverberationConfig(path=tmp_path, probability=1.0))
    rooms, rng = (tmp_path / "hall.wav", tmp_path / "hut.wav"), random.Random(0)
    assert {Sounds(rooms).draw(config, rng).room for _ in range(50)} == set(rooms)


def test_undisturbed_unless_configured():
    assert Sounds().draw(AugmentConfig(), random.Random(0)) is UNDISTURBED  # millions of them


def test_a_room_of_any_level_has_unit_energy_from_its_direct_sound_on(tmp_path):
    response = np.zeros(4000, np.float32)
    response[50], response[100], response[1700] = 0.003, 0.008, 0.004
    soundfile.write(tmp_path / "quiet.wav", response, 16000, subtype="FLOAT")
    room = read_room(tmp_path / "quiet.wav")
    assert np.linalg.norm(room) == pytest.approx(1.0, abs=1e-6)
    assert len(room) == 3900
    assert (room[0], room[1600]) == pytest.approx((0.8944, 0.4472), abs=1e-3)


def test_the_direct_sound_may_be_negative(tmp_path):
    response = np.zeros(4000, np.float32)
    response[100], response[1700] = -0.8, 0.4
    soundfile.write(tmp_path / "inverted.wav", response, 16000, subtype="FLOAT")
    assert len(read_room(tmp_path / "inverted.wav")) == 3900


@pytest.mark.parametrize("read", [read_room, lambda path: read_noise(path, 0.0, 1.0)])
def test_a_pipe_is_no_sound(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(ConfigError, match=r"pipe\.wav must be a sound file: must be a regular file"):
        read(tmp_path / "pipe.wav")


def test_all_channels_of_a_noise_are_heard():
    np.testing.assert_allclose(to_mono_16khz(np.array([[0.0, 1.0], [0.5, 0.0]], np.float32), 16000), [0.5, 0.25])


def test_a_clip_that_augmentation_makes_infinite_is_left_out(tiny_config, tmp_path):
    signal = 1e17 * np.random.default_rng(0).standard_normal(32000)
    soundfile.write(tmp_path / "loud.wav", signal, 16000, subtype="FLOAT")
    loud = Item(Clip(tmp_path / "loud.wav", 2.0, "a"), disturbance=Disturbance(gain_db=400.0))
    good = Item(read_manifest(tiny_config.data.dev)[0])
    (batch,) = load([[good, loud]], FeatureSettings(), 1, training=tiny_config)
    assert list(batch.items) == [good]
    assert "not finite any more after augmentation with Disturbance" in batch.skipped[0][1]
