import shutil
from pathlib import Path

import pytest
from carnelian_perf.accuracy import int8
from carnelian_perf.accuracy.int8 import Measurement, Pair, summarise
from carnelian_perf.cli import main

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


def test_the_raw_file_is_named_after_the_model(tmp_path, call, monkeypatch):
    asked = []

    def measure(*arguments):
        asked.append(arguments[-1])
        return summarise([pair(10, 2, 2)])

    monkeypatch.setattr(int8, "measure", measure)
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(DEMO, tmp_path / "renamed.pt")
    status, _, err = call(main, "int8", "renamed.pt", "--int8-clips", CLIPS, "--manifest", CLIPS)
    assert (status, asked) == (0, [Path("perf/results/quartznet_demo_int8.json")]), err


def test_both_forms_are_measured_on_the_same_clips(tmp_path, call):
    status, _, err = call(
        main, "int8", DEMO, "--int8-clips", CLIPS, "--manifest", CLIPS, "--out", tmp_path / "raw.json"
    )
    assert status == 0, err
    found = Measurement.read(tmp_path / "raw.json")
    assert len(found.pairs) == len(CLIPS.read_text().splitlines())
    assert found.summary.wer_int8 < 0.5
    assert found.summary.same_best > 0.9
