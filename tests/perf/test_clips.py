import io
import json
from collections import Counter
from pathlib import Path

import pytest
import soundfile
from carnelian_perf.clips import LONGEST_S, SHORTEST_S, cut_clips, load_clips, shuffle_order

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


def test_missing_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a manifest must be a file, but .*nowhere\.jsonl"):
        load_clips(tmp_path / "nowhere.jsonl")


def test_every_round_sends_every_clip_equally_often_in_another_order():
    first, second = shuffle_order(12, 4, 0), shuffle_order(12, 4, 1)
    assert first != second
    assert Counter(first) == Counter(second) == dict.fromkeys(range(4), 3)
