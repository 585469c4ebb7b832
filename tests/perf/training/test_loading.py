import re
from pathlib import Path

import pytest
import yaml
from carnelian_perf.cli import main
from carnelian_perf.training.loading import Measurement

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "perf" / "results"


@pytest.fixture
def tiny(tmp_path):
    stages = [{"filters": 8, "kernel": 3, "stride": 2, "residual": False}]
    tree = {
        "name": "tiny",
        "model": {"name": "quartznet", "stages": stages},
        "data": {"train": [{"path": str(ROOT / "demo" / "clips" / "manifest.jsonl"), "repeat": 1}], "batch_s": 5},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_raw_file_holds_both_costs(tiny, tmp_path, call):
    out = tmp_path / "raw.json"
    options = ["--set", "loop.precision=tf32", "--batches", 2, "--steps", 1]
    status, printed, err = call(main, "loading", tiny, *options, "--out", out)
    assert status == 0, err
    assert "training in tf32" in printed
    measured = Measurement.read(out)
    assert measured.precision == "tf32"
    assert (measured.loading.batches, measured.training.steps) == (2, 1)
    for part in (measured.loading, measured.training):
        assert part.audio_s_per_cpu_s == pytest.approx(part.audio_s / part.cpu_s)
        assert part.audio_s > 0


def test_more_batches_than_there_are_is_an_error(tiny, call):
    status, _, err = call(main, "loading", tiny, "--batches", 99)
    assert status == 1
    assert re.search(r"the epoch must have more batches than are read, 99, but has \d+: .*name more clips", err)


def test_a_batch_without_a_clip_that_can_be_read_is_an_error(tiny, tmp_path, call, write_rows):
    rows = [{"audio_filepath": f"{number}.wav", "duration": 4.0, "text": "one two"} for number in range(4)]
    for row in rows:
        (tmp_path / row["audio_filepath"]).write_text("no sound")
    manifest = write_rows(tmp_path / "broken.jsonl", rows)
    trained = f"data.train=[{{path: {manifest}}}]"
    status, _, err = call(main, "loading", tiny, "--set", trained, "--batches", 2, "--steps", 1)
    assert status == 1
    assert "a step must have a clip that can be read, but all of its batch were left out" in err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_loading.json")), ids=lambda path: path.stem)
def test_the_recorded_loader_is_at_least_three_times_as_fast_as_training(path):
    measured = Measurement.read(path)
    assert measured.loading.audio_s_per_cpu_s > 3 * measured.training.audio_s_per_cpu_s
