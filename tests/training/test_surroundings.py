from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_training.cli import main
from carnelian_training.config import AugmentConfig, NoiseConfig, ReverberationConfig
from carnelian_training.data.acoustics import Sounds, read_room
from carnelian_training.data.manifest import Clip, write_manifest
from carnelian_training.synthesis.surroundings import babble

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"


@pytest.fixture
def make(call):
    """Runs the command; returns what training reads of it."""

    def run(directory, seed):
        options = ["--seed", seed, "--rooms", 5, "--noises", 4, "--babble", CLIPS]
        assert call(main, "surroundings", directory, *options)[0] == 0
        noise, rooms = NoiseConfig(path=directory / "noise"), ReverberationConfig(path=directory / "rooms")
        return Sounds.find(AugmentConfig(noise=noise, reverberation=rooms))

    return run


def test_the_command_makes_what_training_reads_and_the_seed_decides(make, tmp_path):
    first, again, other = make(tmp_path / "1", 1), make(tmp_path / "2", 1), make(tmp_path / "3", 2)
    assert (len(first.rooms), len(first.noises)) == (5, 4)
    for kind in ("rooms", "noises"):
        paths = [getattr(sounds, kind) for sounds in (first, again, other)]
        one, same, different = ([soundfile.read(path)[0] for path in files] for files in paths)
        assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
        assert not any(np.array_equal(a, b) for a, b in zip(one, different, strict=True))
        assert all(np.isfinite(sound).all() and np.abs(sound).max() > 0.4 for sound in one)


def test_sounds_that_a_killed_command_had_half_written_go(make, tmp_path):
    (tmp_path / "noise").mkdir()
    partial, others = f".{'0a' * 8}.0002.wav", "._0000.wav"  # as macOS writes beside each file
    for name in (partial, others):
        (tmp_path / "noise" / name).write_bytes(b"half")
    made = [f"{number:04d}.wav" for number in range(4)]
    assert [path.name for path in make(tmp_path, 1).noises] == made
    assert sorted(path.name for path in (tmp_path / "noise").iterdir()) == [others, *made]


def test_a_room_has_its_direct_sound_first_and_decays(make, tmp_path):
    for path in make(tmp_path, 1).rooms:
        response = read_room(path)
        assert np.abs(response).argmax() == 0
        early, late = np.array_split(response[1:] ** 2, 2)
        assert early.sum() > 10 * late.sum()


def test_voices_of_babble_are_the_segments_that_the_manifest_names(tmp_path):
    sound = np.zeros(48_000)
    sound[16_000:32_000] = np.random.default_rng(0).standard_normal(16_000) * 0.1
    soundfile.write(tmp_path / "talk.wav", sound, 16_000)
    mixed = babble([Clip(tmp_path / "talk.wav", 1.0, "a", offset=1.0)], np.random.default_rng(1))
    np.testing.assert_allclose(mixed[:16_000], mixed[16_000:32_000])
    assert np.corrcoef(mixed[:16_000], sound[16_000:32_000])[0, 1] > 0.99


@pytest.mark.parametrize("name", ["missing", "text", "empty", "silent", "nan", "infinite"])
def test_a_voice_that_cannot_be_heard_is_named(bad_clips, name):
    with pytest.raises(ValueError, match=rf"{name}\.wav (cannot be read|must be a voice)"):
        babble([bad_clips[name]], np.random.default_rng(1))


def test_sounds_of_another_run_are_not_left_among_these(tmp_path, call):
    options = ["surroundings", tmp_path, "--noises", 0]
    assert call(main, *options, "--rooms", 2, "--seed", 1)[0] == 0
    before = (tmp_path / "rooms" / "0000.wav").read_bytes()
    status, _, err = call(main, *options, "--rooms", 1, "--seed", 2)
    assert (status, "has 1, such as 0001.wav" in err) == (1, True)
    assert (tmp_path / "rooms" / "0000.wav").read_bytes() == before
    (tmp_path / "rooms" / "README").touch()
    assert call(main, *options, "--rooms", 3, "--seed", 2)[0] == 0
    assert call(main, "surroundings", tmp_path, "--rooms", 0, "--noises", 1)[0] == 0


@pytest.mark.parametrize(("rooms", "noises"), [(0, 0), (-1, 1), (1, -1)])
def test_no_sound_at_all_is_refused(tmp_path, call, rooms, noises):
    assert call(main, "surroundings", tmp_path, "--rooms", rooms, "--noises", noises)[0] == 2


def test_a_manifest_without_voices_is_refused(tmp_path, call):
    write_manifest(tmp_path / "none.jsonl", [])
    status, _, err = call(main, "surroundings", tmp_path / "out", "--babble", tmp_path / "none.jsonl")
    assert status == 2
    assert "must name a manifest with clips" in err
    assert not (tmp_path / "out").exists()


def test_babble_is_three_to_eight_voices_at_once(tmp_path):
    voice = 0.01 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    soundfile.write(tmp_path / "voice.wav", voice, 16000, subtype="FLOAT")
    clips = [Clip(tmp_path / "voice.wav", 2.0, "")]
    times = set()
    for seed in range(30):
        mixed = babble(clips, np.random.default_rng(seed))[:32000]
        times.add(round(float(mixed @ voice / (voice @ voice))))
    assert times == {3, 4, 5, 6, 7, 8}
