import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_training.cli import main
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest

ROOT = Path(__file__).parents[2]
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
DEMO = ROOT / "demo" / "quartznet_demo.pt"


@pytest.fixture
def command(call):
    """Runs `carnelian-train transcribe`."""
    return functools.partial(call, main, "transcribe")


@pytest.fixture
def unlabelled(tmp_path, read_rows, write_rows):
    rows = read_rows(CLIPS)
    rows = [row | {"audio_filepath": str(CLIPS.parent / row["audio_filepath"]), "text": ""} for row in rows]
    return write_rows(tmp_path / "unlabelled.jsonl", rows)


def test_what_is_heard_becomes_the_text_of_a_manifest(unlabelled, tmp_path, command, call):
    status, _, printed = command(DEMO, unlabelled, "--out", tmp_path / "heard.jsonl")
    assert status == 0
    assert "6 of 6 clips" in printed
    call(main, "evaluate", DEMO, CLIPS, "--out", tmp_path / "evaluated.jsonl")
    heard, evaluated = read_manifest(tmp_path / "heard.jsonl"), read_manifest(tmp_path / "evaluated.jsonl")
    assert [clip.text for clip in heard] == [clip.extra["pred_text"] for clip in evaluated]
    assert {clip.extra["text_source"] for clip in heard} == {"quartznet_demo"}
    assert [clip.audio_filepath for clip in heard] == [clip.audio_filepath for clip in read_manifest(unlabelled)]


def test_clips_that_the_model_is_not_sure_of_are_left_out_and_counted(unlabelled, tmp_path, command):
    command(DEMO, unlabelled, "--out", tmp_path / "all.jsonl")
    confidences = sorted(clip.extra["confidence"] for clip in read_manifest(tmp_path / "all.jsonl"))
    assert 0 < confidences[0] < confidences[-1] <= 1
    _, _, printed = command(DEMO, unlabelled, "--out", tmp_path / "sure.jsonl", "--min-confidence", confidences[2])
    assert "4 of 6 clips" in printed
    assert "2 fell below --min-confidence" in printed
    assert "no clips to train on" not in printed
    assert min(clip.extra["confidence"] for clip in read_manifest(tmp_path / "sure.jsonl")) == confidences[2]
    _, _, printed = command(DEMO, unlabelled, "--out", tmp_path / "none.jsonl", "--min-confidence", 1)
    assert "6 fell below --min-confidence" in printed
    assert "none.jsonl has no clips to train on" in printed


def test_clips_in_which_nothing_is_heard_are_left_out_and_counted(unlabelled, tmp_path, command):
    soundfile.write(tmp_path / "hush.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 1600), 16_000)
    hush = Clip(audio_filepath=tmp_path / "hush.wav", duration=0.1, text="")
    write_manifest(tmp_path / "more.jsonl", [*read_manifest(unlabelled), hush])
    _, _, printed = command(DEMO, tmp_path / "more.jsonl", "--out", tmp_path / "heard.jsonl")
    assert "6 of 7 clips" in printed
    assert "nothing was heard in 1" in printed
    assert all(clip.text for clip in read_manifest(tmp_path / "heard.jsonl"))


def test_a_manifest_that_cannot_be_written_is_refused_before_any_clip_is_heard(unlabelled, tmp_path, command):
    status, _, err = command(DEMO, unlabelled, "--out", unlabelled / "heard.jsonl")
    assert status == 2
    assert "must be a file that can be written" in err


def test_bad_clips_are_named_counted_and_left_out(bad_clips, tmp_path, command, caplog, read_rows):
    good = read_manifest(CLIPS)
    write_manifest(tmp_path / "mixed.jsonl", [*good[:2], bad_clips["missing"], *good[2:], bad_clips["nan"]])
    status, _, printed = command(DEMO, tmp_path / "mixed.jsonl", "--out", tmp_path / "heard.jsonl")
    assert status == 0
    assert "6 of 8 clips" in printed
    assert "2 could not be read" in printed
    assert sorted(re.findall(r"skipped .*/(\w+)\.wav: ", caplog.text)) == ["missing", "nan"]
    command(DEMO, CLIPS, "--out", tmp_path / "good.jsonl")
    assert read_rows(tmp_path / "heard.jsonl") == read_rows(tmp_path / "good.jsonl")


def test_two_processes_leave_out_what_either_cannot_read(bad_clips, tmp_path, command, second_process):
    good = read_manifest(CLIPS)
    short, long = (replace(bad_clips["missing"], duration=seconds) for seconds in (0.1, 60))  # one for each process
    write_manifest(tmp_path / "mixed.jsonl", [*good[:2], short, *good[2:], long])
    arguments = (DEMO, tmp_path / "mixed.jsonl", "--out", tmp_path / "heard.jsonl")
    with second_process("-m", "carnelian_training.cli", "transcribe", *arguments) as second:
        status, _, printed = command(*arguments)
        assert second.wait() == 0
    assert status == 0
    assert "6 of 8 clips" in printed
    assert "2 could not be read" in printed
    assert [clip.audio_filepath.name for clip in read_manifest(tmp_path / "heard.jsonl")] == [
        clip.audio_filepath.name for clip in good
    ]


def test_no_manifest_is_written_where_no_clip_can_be_read(bad_clips, tmp_path, command):
    write_manifest(tmp_path / "bad.jsonl", [bad_clips["missing"], bad_clips["text"]])
    status, _, err = command(DEMO, tmp_path / "bad.jsonl", "--out", tmp_path / "heard.jsonl")
    assert status == 1
    assert "bad.jsonl must name clips that can be read, but none of its 2 can" in err
    assert not (tmp_path / "heard.jsonl").exists()
