import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_perf.clips import LONGEST_S, SHORTEST_S, check_clips, cut_clips, load_clips, shuffle_order

MANIFEST = Path(__file__).parents[2] / "demo/clips/manifest.jsonl"


def test_cut_clips_are_the_same_every_time():
    assert cut_clips(MANIFEST, 5) == cut_clips(MANIFEST, 5)


def test_cut_clips_are_of_mixed_length_at_16_khz():
    clips = cut_clips(MANIFEST, 40)
    assert all(SHORTEST_S <= clip.duration_s <= LONGEST_S for clip in clips)
    assert len({clip.duration_s for clip in clips}) > 30
    file = soundfile.info(io.BytesIO(clips[0].wav))
    assert (file.samplerate, file.channels, file.duration) == (16_000, 1, clips[0].duration_s)
    assert clips[0].frames == file.frames // 160 + 1


def test_loaded_clips_keep_their_durations():
    durations = sorted(json.loads(line)["duration"] for line in MANIFEST.read_text().splitlines())
    clips = load_clips(MANIFEST)
    assert sorted(clip.duration_s for clip in clips) == pytest.approx(durations, abs=0.1)


def test_manifest_without_clips_is_refused(tmp_path):
    path = tmp_path / "manifest.jsonl"
    path.touch()
    with pytest.raises(ValueError, match="has none"):
        load_clips(path)


def test_clips_without_samples_are_refused(tmp_path):
    soundfile.write(tmp_path / "empty.wav", [], 16_000)
    path = tmp_path / "manifest.jsonl"
    path.write_text('{"audio_filepath": "empty.wav", "duration": 1}\n')
    with pytest.raises(
        ValueError, match=r"must name clips that have samples, but those of .*manifest\.jsonl have none"
    ):
        cut_clips(path)


@pytest.mark.parametrize("read", [check_clips, cut_clips, load_clips])
@pytest.mark.parametrize(
    ("name", "words"),
    [("gone.wav", "No such file"), ("text.wav", "Format not recognised"), ("folder", "Is a directory")],
)
def test_a_clip_that_cannot_be_read_is_named_with_its_manifest(tmp_path, write_rows, read, name, words):
    (tmp_path / "text.wav").write_text("no sound")
    (tmp_path / "folder").mkdir()
    manifest = write_rows(tmp_path / "clips.jsonl", [{"audio_filepath": name, "duration": 1}])
    with pytest.raises(
        ValueError, match=f"{manifest} must name sound .* but {tmp_path / name} cannot be: {words}.*mend"
    ):
        read(manifest)


def test_a_clip_is_read_whatever_its_name(tmp_path, write_rows):
    soundfile.write(tmp_path / "sound.raw", np.zeros(800), 8_000, format="WAV")
    manifest = write_rows(tmp_path / "clips.jsonl", [{"audio_filepath": "sound.raw", "duration": 0.1}])
    check_clips(manifest)
    assert [clip.duration_s for clip in load_clips(manifest)] == [0.1]


def test_missing_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a manifest must be a file, but .*nowhere\.jsonl"):
        load_clips(tmp_path / "nowhere.jsonl")


def test_every_round_sends_every_clip_equally_often_in_another_order():
    first, second = shuffle_order(12, 4, 0), shuffle_order(12, 4, 1)
    assert first != second
    assert Counter(first) == Counter(second) == dict.fromkeys(range(4), 3)
