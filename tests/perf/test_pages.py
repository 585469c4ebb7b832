"""Every committed page is what its committed raw file says, by the public command."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from carnelian_perf.cli import main
from carnelian_perf.output import show_page
from carnelian_perf.pages import table
from carnelian_perf.raw_file import write
from carnelian_perf.traffic import batching_results
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
RESULTS = Path("perf/results")
RAW_FILES = [path for path in sorted((ROOT / RESULTS).glob("*.json")) if path.with_suffix(".md").is_file()]
SWEEPS = sorted(path for path in (ROOT / RESULTS).glob("*_sweep") if path.is_dir())
ONE_OF_EACH = {path.stem.rpartition("_")[2]: path for path in RAW_FILES}.values()
"""Of each command's."""
GROWS = {"batching", "mixed", "infer", "tune", "overhead", "request", "memory", "training", "hourglass"}
"""What these commands write grows with each part."""


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def run(tmp_path, monkeypatch, call):
    """Runs a command line in a folder that has a copy of the raw files."""
    monkeypatch.chdir(tmp_path)
    RESULTS.mkdir(parents=True)

    def run(command, expected=0):
        status, _, err = call(main, *shlex.split(command)[1:])
        assert status == expected, err
        return err

    return run


def test_short_rows_are_filled_and_numbers_are_aligned_right():
    lines = ["| way | ms | ratio |", "| --- | --: | --- |", "| plain | **1.5** | - |", "| padded | not run |  |"]
    assert table(["way", "ms", "ratio"], [["plain", "**1.5**", "-"], ["padded", "not run"]]).splitlines() == lines


@pytest.mark.parametrize("path", RAW_FILES, ids=lambda path: path.stem)
def test_page_is_what_its_raw_file_says(path, run):
    shutil.copy(path, RESULTS)
    run(f"carnelian-perf report {RESULTS / path.name}")
    page = RESULTS / f"{path.stem}.md"
    assert (ROOT / page).read_text() == page.read_text()
    assert page.with_suffix(".png").is_file() == (ROOT / page).with_suffix(".png").is_file()


def test_another_published_table_is_chosen_for_a_page_of_infer_alone(run):
    infer = next(path for path in RAW_FILES if read(path)["subject"] == "infer" and not read(path).get("published"))
    tune = next(path for path in RAW_FILES if read(path)["subject"] == "tune")
    for path in (infer, tune):
        shutil.copy(path, RESULTS)
    run(f"carnelian-perf report {RESULTS / infer.name} --published-model quartznet_15x5")
    assert "| published avg |" in (RESULTS / f"{infer.stem}.md").read_text()
    assert (RESULTS / infer.name).read_bytes() == infer.read_bytes()
    err = run(f"carnelian-perf report {RESULTS / tune.name} --published-model nonsense", expected=1)
    assert "must be of infer, or of a sweep, for a published table beside it" in err
    assert not (RESULTS / f"{tune.stem}.md").exists()


@pytest.mark.parametrize(
    ("options", "note", "columns"),
    [
        ("--published-model jasper_10x5dr", "jasper_10x5dr, NVIDIA DGX A100 (1x A100 80GB), fp16, by others", 1),
        (
            "--published-model wav2vec2_base_hourglass --published-precision bf16",
            "wav2vec2_base_hourglass, NVIDIA DGX A100 (1x A100 80GB), bf16, has none of these durations and batches",
            0,
        ),
    ],
    ids=["that fits", "without one of its cells"],
)
def test_another_published_table_takes_the_place_of_the_raw_files(run, options, note, columns):
    raw = RESULTS / "quartznet_demo_infer.json"
    shutil.copy(ROOT / raw, raw)
    assert read(raw)["published"]["model"] == "quartznet_15x5"
    command = f"carnelian-perf report {raw} {options}"
    run(command)
    page = raw.with_suffix(".md").read_text()
    assert f"\n- Published avg: {note}" in page
    assert page.endswith(f"\n- This page: `{command}`.\n")
    assert page.count("Published avg") == 1
    assert page.count("| published avg |") == columns


@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_strings_of_raw_files_are_text(path, run):
    words = "![a](secret.png) <img src=b.png> `"
    content = read(path)
    content |= {"commit": words, "command": f"{words} {words}", "machine": dict.fromkeys(content["machine"], words)}
    content |= {"versions": dict.fromkeys(content["versions"], words)}
    write(RESULTS / path.name, content)
    run(f"carnelian-perf report {RESULTS / path.name}")
    body = MarkdownIt("commonmark").enable("table").render((RESULTS / f"{path.stem}.md").read_text())
    assert [found for found in re.findall('<img src="([^"]*)', body) if found != f"{path.stem}.png"] == []
    assert "![a](secret.png) &lt;img" in body


def test_pages_need_none_of_the_extras(tmp_path):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()));"
        "from typer.testing import CliRunner; from carnelian_perf.cli import app;"
        "errors = [CliRunner().invoke(app, [*command.split()]).exception for command in sys.argv[1:]];"
        "print([error for error in errors if error])"
    )
    extras = "carnelian_export carnelian_serving carnelian_training onnx onnxruntime psutil soundfile soxr torch tqdm"
    commands = []
    for path in ONE_OF_EACH:
        shutil.copy(path, tmp_path)
        commands.append(f"report {tmp_path / path.name}")
    command = [sys.executable, "-c", code, extras, *commands]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_page_that_a_full_disk_has_no_room_for_stays_as_it_was(path, run, room):
    shutil.copy(path, RESULTS)
    page = RESULTS / f"{path.stem}.md"
    page.write_text("old")
    with room(500):
        run(f"carnelian-perf report {RESULTS / path.name}", expected=1)
    assert page.read_text() == "old"


@pytest.mark.parametrize("path", [path for path in ONE_OF_EACH if GROWS & {*path.stem.split("_")}])
def test_page_of_an_interrupted_command_says_so(path, run):
    content = read(path) | {"finished": False}
    content.get("kept", {}).pop("confirmation", None)
    raw = RESULTS / path.name
    raw.write_text(json.dumps(content))
    run(f"carnelian-perf report {raw}")
    assert "\n\n**Not finished.** " in raw.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("quartznet_demo_infer", ("common", 0, "duration_s"), 3.5),  # no timing has it
        ("quartznet_demo_infer", ("common", 0, "features_ms"), []),
        ("quartznet_15x5_overhead", ("ways",), {}),
        ("quartznet_15x5_training", ("machine",), {}),
        ("wav2vec2_base_hourglass", ("machine",), {}),
        ("quartznet_demo_first_request", ("machine",), {}),
        ("quartznet_demo_tune_throughput", ("machine",), {}),
        ("quartznet_demo_mixed", ("machine",), {}),
        ("quartznet_demo_infer", ("published",), {"model": "quartznet_15x5"}),
        ("quartznet_15x5_overhead", ("runs", 0, "way"), "another"),
        ("quartznet_demo_batching", ("candidates",), {}),
        ("quartznet_demo_tune_throughput", ("tunings",), {}),
        ("quartznet_demo_tune_throughput", ("runs", 0, "step"), "another"),
        ("quartznet_demo_infer", ("gflop_per_s",), 0),
        ("quartznet_demo_infer", ("gflop_per_s",), float("nan")),
    ],
)
def test_raw_file_whose_parts_do_not_fit_is_named(name, keys, value, run):
    content = read(ROOT / RESULTS / f"{name}.json")
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    raw = RESULTS / f"{name}.json"
    raw.write_text(json.dumps(content))
    err = run(f"carnelian-perf report {raw}", expected=1)
    assert f"{raw} must " in err
    assert err.count(" must ") == 1
    assert not raw.with_suffix(".md").is_file()


def test_fault_of_a_plot_is_not_of_the_raw_file(measurement, tmp_path, monkeypatch):
    measurement.write(raw := tmp_path / "raw.json")
    monkeypatch.setattr(batching_results, "draw", MagicMock(side_effect=TypeError("of drawing")))
    with pytest.raises(TypeError, match="of drawing"):
        show_page(raw)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_report_is_what_its_sweep_says(path, run):
    shutil.copytree(ROOT / RESULTS, RESULTS, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md", "*.html"))
    page = RESULTS / f"{path.name}.md"
    committed = (ROOT / page).read_text()
    (command,) = re.findall(r"This page: `(.*)`", committed)
    run(command)
    assert page.read_text() == committed
    assert page.with_suffix(".html").is_file()
