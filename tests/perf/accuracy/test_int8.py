import shutil
from pathlib import Path

import pytest
from carnelian_perf.accuracy import int8
from carnelian_perf.accuracy.int8 import Measurement, Pair, check_others, summarise
from carnelian_perf.cli import main
from carnelian_training.data.manifest import Clip

ROOT = Path(__file__).parents[3]
DEMO, CLIPS = ROOT / "demo" / "quartznet_demo.pt", ROOT / "demo" / "clips" / "manifest.jsonl"


def pair(words: int, errors_fp32: int, errors_int8: int) -> Pair:
    return Pair(
        clip="a.wav",
        words=words,
        errors_fp32=errors_fp32,
        errors_int8=errors_int8,
        frames=10,
        same_best=9,
        best_distance=1.0,
        cpu_fp32_s=2.0,
        cpu_int8_s=1.0,
    )


def test_clips_that_int8_was_calibrated_on_are_refused(tmp_path):
    def clip(name, offset=None):
        return Clip(tmp_path / name, 2.0, "yes", offset=offset)

    seen = [clip("a.wav"), clip("b.wav", 2.0)]
    check_others(seen, [clip("c.wav"), clip("b.wav")])
    for again, title in ((clip("x/../a.wav", 0.0), "a.wav at 0 s"), (clip("b.wav", 2.0), "b.wav at 2 s")):
        with pytest.raises(ValueError, match=rf"must have other clips than --int8-clips, but .*{title} is in both"):
            check_others(seen, [clip("c.wav"), again])


def test_differences_are_paired_and_counted_over_all_words():
    summary = summarise([pair(10, 5, 6), pair(30, 15, 16), pair(10, 0, 1)])
    assert summary.wer_fp32 == pytest.approx(20 / 50)
    assert summary.difference == pytest.approx(3 / 50)
    assert (summary.same_best, summary.best_distance, summary.times_as_fast) == pytest.approx((0.9, 0.1, 2))


def test_the_interval_holds_the_difference_and_is_a_point_where_clips_agree():
    summary = summarise([pair(10, 2, 1), pair(10, 2, 4), pair(10, 2, 2), pair(10, 5, 6)])
    assert summary.difference_low < summary.difference < summary.difference_high
    same = summarise([pair(10, 2, 2), pair(10, 5, 5)])
    assert (same.difference_low, same.difference, same.difference_high) == (0, 0, 0)


def test_the_raw_file_is_named_after_the_model(origin, tmp_path, call, monkeypatch):
    pairs = [pair(10, 2, 2)]
    monkeypatch.setattr(int8, "measure", lambda *_: Measurement(**origin, summary=summarise(pairs), pairs=pairs))
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(DEMO, tmp_path / "renamed.pt")
    status, _, err = call(main, "int8", "renamed.pt", "--int8-clips", CLIPS, "--manifest", CLIPS)
    assert status == 0, err
    assert Path("perf/results/quartznet_demo_int8.json").is_file()


def test_what_was_measured_is_printed_even_if_the_raw_file_finds_no_room(origin, tmp_path, call, monkeypatch, room):
    pairs = [pair(10, 2, 2)]
    monkeypatch.setattr(int8, "measure", lambda *_: Measurement(**origin, summary=summarise(pairs), pairs=pairs))
    manifests = ("--int8-clips", CLIPS, "--manifest", CLIPS)
    with room(50):
        status, printed, err = call(main, "int8", DEMO, *manifests, "--out", tmp_path / "raw.json")
    assert (status, "raw.json could not be written" in err) == (1, True)
    assert "WER 20.00% in float32, 20.00% in int8" in printed


def test_both_forms_are_measured_on_the_same_clips(tmp_path, call):
    lines = CLIPS.read_text().replace('"audio_filepath": "', f'"audio_filepath": "{CLIPS.parent}/').splitlines(True)
    (tmp_path / "others.jsonl").write_text("".join(lines[:-2]))
    (tmp_path / "clips.jsonl").write_text("".join(lines[-2:]))
    manifests = ("--int8-clips", tmp_path / "others.jsonl", "--manifest", tmp_path / "clips.jsonl")
    status, _, err = call(main, "int8", DEMO, *manifests, "--out", tmp_path / "raw.json")
    assert status == 0, err
    found = Measurement.read(tmp_path / "raw.json")
    assert len(found.pairs) == 2
    assert found.summary.wer_int8 < 0.5
    assert found.summary.same_best > 0.9
