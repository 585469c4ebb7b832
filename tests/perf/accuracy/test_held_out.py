import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from carnelian_perf.accuracy.held_out import ClipErrors, Measurement, deal, summarise
from carnelian_perf.cli import main
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest

ROOT = Path(__file__).parents[3]
NGRAMS = ROOT / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"


def clip(speaker: str, words: int, word: str | None = None) -> Clip:
    return Clip(Path(f"{speaker}.wav"), 1.0, f"{word or speaker} " * words, {"speaker": speaker})


def test_no_speaker_is_in_two_groups_and_groups_are_about_equal():
    clips = [clip("ada", 5), clip("ben", 4), clip("ada", 3), clip("cyd", 4), clip("ben", 1)]
    assert deal(clips, 2) == [0, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="there are 3 for 4 groups"):
        deal(clips, 4)


def test_clips_whose_speaker_is_null_are_speakers_by_themselves_and_counted(caplog):
    clips = [replace(clip(name, 1), extra={"speaker": None}) for name in "abc"]
    assert sorted(deal([*clips, clip("dan", 1)], 4)) == [0, 1, 2, 3]
    (warning,) = caplog.messages
    assert warning.startswith("3 of 4 clips name no `speaker`")


def test_clips_without_a_speaker_are_apart_whatever_their_files_are_called(tmp_path):
    nameless = [Clip(tmp_path / folder / "ada", 1.0, f"in {folder}") for folder in "ab"]
    assert sorted(deal([*nameless, clip("ada", 2)], 3)) == [0, 1, 2]
    errors = [(None, 0, 0), (None, 10, 0), ("ada", 10, 0)]
    rows = [ClipErrors("ada", who, 0, 10, {"greedy": one, "n-gram": two}) for who, one, two in errors]
    (gain,) = summarise(rows).gains
    (joined,) = summarise([replace(row, speaker="ada") for row in rows]).gains
    assert gain.low < gain.difference < gain.high
    assert joined.low == joined.difference == joined.high


def test_many_clips_are_dealt_in_no_time():
    clips = [Clip(Path(f"{i}.wav"), 1.0, f"{i}" if i % 2 else f"{i + 1}") for i in range(20_000)]  # each text twice
    started = time.process_time()
    groups = deal(clips, 10)
    assert time.process_time() - started < 5  # 0.1 s; comparing each with each takes minutes
    assert groups[::2] == groups[1::2]


def test_no_sentence_is_in_two_groups():
    clips = [clip("ada", 5, "x"), clip("ben", 5, "y"), clip("ben", 5, "x"), clip("cyd", 5, "y"), clip("dan", 5)]
    assert deal(clips, 2) == [0, 0, 0, 0, 1]


def test_each_way_is_compared_with_the_one_before_in_pairs():
    rows = [ClipErrors(f"{i}.wav", f"speaker {i}", 0, 10, {"greedy": 5, "n-gram": 3 + i % 2}) for i in range(8)]
    summary = summarise(rows)
    assert summary.wer == {"greedy": 0.5, "n-gram": 0.35}
    (gain,) = summary.gains
    assert (gain.before, gain.after, gain.difference) == ("greedy", "n-gram", pytest.approx(-0.15))
    assert -0.2 <= gain.low < -0.15 < gain.high <= -0.1


def test_the_demo_is_heard_with_weights_of_other_speakers(tmp_path, call):
    clips = [
        replace(clip, extra={"speaker": name})
        for clip, name in zip(read_manifest(ROOT / "demo" / "clips" / "manifest.jsonl"), "ab", strict=False)
    ]
    write_manifest(tmp_path / "clips.jsonl", clips)
    arguments = [ROOT / "demo" / "quartznet_demo.pt", tmp_path / "clips.jsonl", "--lm", NGRAMS]
    status, out, err = call(main, "held-out", *arguments, "--groups=2", "--out", tmp_path / "raw.json")
    assert status == 0, err
    measured = Measurement.read(tmp_path / "raw.json")
    assert [row.group for row in measured.clips] == [0, 1]
    assert len(measured.options) == 2
    assert list(measured.summary.wer) == ["greedy", "n-gram"]
    (gain,) = json.loads((tmp_path / "raw.json").read_text())["summary"]["gains"]
    assert (gain["from"], gain["to"]) == ("greedy", "n-gram")
    assert re.search(r"^greedy to n-gram: [+-]\d+\.\d\d points, 95 % interval \S+ to [+-]\d+\.\d\d$", out, re.M)
