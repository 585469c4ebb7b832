import inspect
import json
import re
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer.main
from carnelian_perf import networks
from carnelian_perf.cli import EXTRAS, app, main
from carnelian_perf.options import check_writable
from carnelian_perf.output import RESULTS
from carnelian_training import command_options

ROOT = Path(__file__).parents[2]
DEMO, DEMO_CLIPS = "demo/quartznet_demo.pt", "demo/clips/manifest.jsonl"
INFER = "perf/results/quartznet_demo_infer.json"
QUARTZNET = "training/configs/quartznet_15x5.yaml"


@pytest.fixture(autouse=True)
def at_the_root_of_a_wide_terminal(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")  # words stay together however narrow the terminal is


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["batching", "--colour", "red"], "--colour"),
        (["sweep-everything"], "sweep-everything"),
        (["batching", "--concurrency", "0"], "--concurrency"),
        (["batching", "--model", "jasper"], "'jasper'; it has quartznet_demo"),
        (["batching", "--repository", "nowhere"], "nowhere is not there"),
        (["batching", "--checkpoint", "nowhere.pt"], "--checkpoint"),
        (["batching", "--manifest", "nowhere.jsonl"], "--manifest"),
        (["report", "nowhere.json"], "RAW must be a raw file or the folder of a sweep"),
        (["report", "/dev/null"], "but /dev/null is a pipe or a device"),
        (["report", INFER, "--infer", INFER], f"but {INFER} is a file; leave it out"),
        (
            ["report", "perf/README.md"],
            "RAW must end in .json, for its page and plot go beside it and would overwrite a RAW in .md or .png, but "
            "is perf/README.md; rename it",
        ),
        (["report", INFER, "--published-model", "jasper"], "for '--published-model': model 'jasper', machine 'A100'"),
        (["report", "perf/results", "--published-model", "jasper"], "'fp16' must choose one published table"),
        (["report", "nowhere.json", "--published-model", "jasper"], "RAW must be a raw file"),
        (["infer", DEMO, "--published-model", "jasper"], "for '--published-model': model 'jasper', machine 'A100'"),
        (["batching", "--out", "table.md"], ".json"),
        (["infer", "demo/quartznet_demo.pt", "--out", "table.md"], ".json"),
        (["hourglass", "--out", "README.md/raw.json"], "README.md is in the way"),
        (["accuracy", DEMO_CLIPS, "--out", "perf"], "perf is in the way"),
        (["tune", "--write", "README.md/tuning.json"], "README.md is in the way"),
        (["words", DEMO, DEMO_CLIPS, "--lm", DEMO, "--calibration", "perf"], "perf is in the way"),
        (["sweep", "nowhere.yaml"], "nowhere.yaml"),
        (["mixed", "--model", "jasper"], "quartznet_demo"),
        (["mixed", "--model", "jasper", "--seconds", "inf"], "--seconds"),
        (["mixed", "--model", "jasper", "--target", "inf"], "--target"),
        (["infer", "demo/quartznet_demo.pt", "--engines", "steam"], "steam"),
        (["infer", "demo/quartznet_demo.pt", "--durations", "2,x"], "--durations"),
        (["infer", "demo/quartznet_demo.pt", "--batches", "1,9999999999999"], "from 1 to 1024"),
        (["accuracy", "nowhere.jsonl"], "this must be a file, but nowhere.jsonl is not there"),
        (["accuracy", "/dev/null"], "but /dev/null is a folder, a pipe or a device; name a file on disk"),
        (["training"], "Missing argument"),
        (["training", QUARTZNET, "--batches", "1,x"], "--batches"),
        (["infer"], "Missing argument"),
        (["infer", DEMO, "--threads", "1025"], "--threads"),
        (["hourglass", "training/configs/wav2vec2_base.yaml", "--threads", "1025"], "--threads"),
        (["training", QUARTZNET, "--threads", "1025"], "--threads"),
        (["infer", "nowhere.pt"], "nowhere.pt"),
        (["decoding", "nowhere.pt", DEMO_CLIPS, "--lm", DEMO], "nowhere.pt"),
        (["decoding", DEMO, DEMO_CLIPS, "--lm", "nowhere.klm"], "--lm"),
        (["decoding", DEMO, DEMO_CLIPS, "--lm", DEMO, "--boosts", "4,x"], "--boosts"),
        (["held-out", DEMO, "nowhere.jsonl", "--lm", DEMO], "nowhere.jsonl"),
        (["words", DEMO, DEMO_CLIPS, "--lm", DEMO, "--lm-weights", "nowhere.json"], "--lm-weights"),
        (["loading", "nowhere.yaml"], "nowhere.yaml"),
        (["sweep", "nowhere.yaml", "--out", ""], "must be a folder"),
        (["training", "nowhere.yaml"], "nowhere.yaml"),
        (["training", QUARTZNET, "--threads", "2", "--processes", "1,2"], "--threads"),
        (
            ["words", DEMO, DEMO_CLIPS, "--lm", DEMO, "--out", "a.json", "--calibration", "a.json"],
            "must be another file",
        ),
        (
            ["words", DEMO, DEMO_CLIPS, "--lm", DEMO, "--out", "a.json", "--calibration", "a.png"],
            "must be another file",
        ),
        (["tune", "--out", "raw.json", "--write", "raw.json"], "must be another file"),
        (["tune", "--out", "raw.json", "--write", "raw.md"], "must be another file"),
        (["training", QUARTZNET, "--precisions", "fp32,fp8"], "fp8"),
        (["hourglass", "training/configs/wav2vec2_base.yaml", "--factors", "1,2"], "--factors must be above 1"),
        (["tune", "--objective", "beauty"], "beauty"),
        (["tune", "--model", "jasper"], "quartznet_demo"),
        (["tune", "--model", "jasper", "--target", "inf"], "--target"),
        (["overhead", "--durations", "0"], "--durations"),
        (["overhead", "--clips", "4"], "--clips must be a multiple of --batch, 8, but is 4"),
        (["overhead", "--clips", "8"], "--clips must be one for each of --clients, 16, at least, but is 8"),
        (["overhead", "--batch", "64", "--clips", "64"], "--batch must be at most 32, what the model takes, but is 64"),
        (["overhead", "--random-weights", "nowhere.yaml"], "nowhere.yaml"),
        (["first-request", "--requests", "3"], "--requests"),
        (["first-request", "--format", "mp3"], "mp3"),
        (["memory", "--manifest", "nowhere.jsonl"], "nowhere.jsonl"),
        (["memory", "--requests", "100", "--every", "50"], "--every"),
    ],
)
def test_wrong_use_is_status_2_and_named(call, arguments, words):
    status, _, err = call(main, *arguments)
    assert status == 2
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["infer"],
        *([command, DEMO_CLIPS, "--lm", DEMO] for command in ("decoding", "held-out", "words")),
        ["int8", "--int8-clips", DEMO_CLIPS, "--manifest", DEMO_CLIPS],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_checkpoint_may_be_a_folder_of_hugging_face(tmp_path, call, arguments):
    status, _, err = call(main, *arguments[:1], tmp_path, *arguments[1:])
    assert (status, f"{tmp_path} must be a Hugging Face folder, but has no config.json" in err) == (1, True), err


@pytest.mark.parametrize("command", ["batching", "mixed"])
@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ("tests/training/references/wav2vec2_new.pt", "must be a Jasper or QuartzNet"),  # as its weights tell
        (QUARTZNET, "cannot be read as a checkpoint"),  # random weights would be compared with those that are served
    ],
    ids=["fairseq", "yaml"],
)
def test_what_a_model_was_exported_from_may_be_another_toolkits_but_no_yaml(command, checkpoint, words, call, tmp_path):
    status, _, err = call(main, command, "--checkpoint", checkpoint, "--out", tmp_path / "raw.json")
    assert (status, words in err) == (1, True), err


@pytest.mark.parametrize("command", ["mixed", "tune", "overhead", "first-request"])
def test_what_is_not_there_is_refused_before_an_export(command, tmp_path, call, monkeypatch):
    monkeypatch.setattr(networks, "export_random", lambda *_: pytest.fail("exported"))
    monkeypatch.chdir(tmp_path)  # where there is no demo
    status, _, err = call(main, command, "--random-weights", ROOT / QUARTZNET, "--manifest", "nowhere.jsonl")
    assert (status, "--manifest must be a file, but nowhere.jsonl is not there" in err) == (2, True), err


@pytest.mark.parametrize("command", ["infer", "batching", "mixed", "tune", "overhead", "first-request", "memory"])
def test_a_missing_clip_is_refused_before_anything_is_loaded(command, call, tmp_path, write_rows):
    there = {"audio_filepath": str(ROOT / "demo/clips/harbour.flac"), "duration": 4.5}
    manifest = write_rows(tmp_path / "clips.jsonl", [there, {"audio_filepath": "gone.wav", "duration": 1}])
    source = [ROOT / DEMO] if command == "infer" else ["--repository", ROOT / "model_repository"]
    status, _, err = call(main, command, *source, "--manifest", manifest, "--out", tmp_path / "raw.json")
    told = f"carnelian-perf: {manifest} must name sound files that can be read, but {tmp_path / 'gone.wav'} cannot be"
    assert (status, err.startswith(told)) == (1, True), err
    assert not (tmp_path / "raw.json").exists()


@pytest.mark.parametrize("command", ["mixed", "tune", "overhead", "first-request"])
def test_what_cannot_be_written_by_default_is_refused_before_an_export(command, tmp_path, call, monkeypatch):
    monkeypatch.setattr(networks, "export_random", lambda *_: pytest.fail("exported"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "perf").touch()
    options = ("--random-weights", ROOT / QUARTZNET, "--manifest", ROOT / DEMO_CLIPS)
    status, _, err = call(main, command, *options)
    assert (status, "perf/results/quartznet_15x5_" in err) == (2, True), err
    assert "Invalid value for '--out': this must be a file that can be written, but the file " in err


def test_a_folder_in_place_of_the_default_tuning_is_named_with_the_option(tmp_path, call):
    (tmp_path / "raw_tuning.json").mkdir()
    status, _, err = call(main, "tune", "--out", tmp_path / "raw.json")
    assert status == 2
    assert "Invalid value for '--write': this must be a file that can be written, but the folder " in err


def test_a_tuning_over_its_raw_file_is_refused_before_an_export(tmp_path, call, monkeypatch):
    monkeypatch.setattr(networks, "export_random", lambda *_: pytest.fail("exported"))
    raw = tmp_path / "tune.json"
    status, _, err = call(main, "tune", "--random-weights", ROOT / QUARTZNET, "--out", raw, "--write", raw)
    assert (status, "must be another file" in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "option"), [(["mixed", "--manifest", DEMO_CLIPS], "--checkpoint"), (["tune"], "--manifest")]
)
def test_a_default_of_the_repository_is_told_from_what_was_given(arguments, option, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = call(main, *arguments)
    assert status == 2
    assert f"{option} must be a file" in err
    assert "is not there (the default, found from the root of the repository); name a file" in err


@pytest.mark.parametrize("command", RESULTS)
def test_what_lacks_all_of_a_raw_file_but_its_subject_is_status_1(tmp_path, call, command):
    path = tmp_path / "raw.json"
    path.write_text(json.dumps({"subject": command}))
    status, _, err = call(main, "report", path)
    assert status == 1
    assert f"must be a raw file of `carnelian-perf {command}`" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("steam", "but is no JSON: Expecting value"),
        pytest.param("[" * 100_000, "but is no JSON: ", id="deep"),
        ("[]", "but has no `subject`"),
        ("{}", "but has no `subject`"),
        ('{"date": "2026-11-21"}', "another version of carnelian-perf wrote it, or it was edited; what wrote it can"),
        ('{"subject": "words"}', "of which a page can be made, but its `subject` is 'words'"),
        ('{"subject": "sweep"}', "of a sweep, name the folder"),
        ('{"subject": ["tune"]}', "but its `subject` is \"['tune']\""),
    ],
)
def test_a_page_of_what_is_no_raw_file_is_status_1(tmp_path, call, content, words):
    path = tmp_path / "raw.json"
    path.write_text(content)
    status, _, err = call(main, "report", path)
    assert status == 1
    assert f"{path} must be a raw file" in err
    assert words in err
    assert [*tmp_path.iterdir()] == [path]


def test_what_cannot_be_written_is_refused_as_training_does():
    """Neither needs the other, so each has a copy."""
    checks = (check_writable, command_options.check_writable)
    ours, theirs = (inspect.getsource(check).split('"""')[-1] for check in checks)  # all but the docstring
    assert ours == theirs


def test_help_is_light():
    code = (
        "import sys; from typer.testing import CliRunner; from carnelian_perf.cli import app;"
        "result = CliRunner().invoke(app, ['batching', '--help']); assert result.exit_code == 0, result.output;"
        "print({'torch', 'onnx', 'matplotlib', 'tritonclient'} & set(sys.modules) or 'light')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "light\n", result.stderr


def test_a_sweep_and_its_report_need_neither_torch_nor_onnx():
    blocked = "import sys; sys.modules.update(torch=None, onnx=None)"
    modules = "carnelian_perf.cli, carnelian_perf.sweeps.run, carnelian_perf.sweeps.report"
    command = [sys.executable, "-c", f"{blocked}; import {modules}"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_commands_of_the_extra_training_need_no_server():
    [row] = re.findall(r"^\| `training` \| (.+?) \|", (ROOT / "perf" / "README.md").read_text(), re.MULTILINE)
    names = re.findall(r"`(.+?)`", row)
    commands = typer.main.get_command(app).commands
    sources = "".join(inspect.getsource(commands[name].callback) for name in names)
    modules = re.findall(r"from (\S+) import .*\bmeasure$", sources, re.MULTILINE)
    assert len(modules) == len(names)
    blocked = "import sys; sys.modules['carnelian_serving'] = None"
    command = [sys.executable, "-c", f"{blocked}; import {', '.join(modules)}"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_missing_library_is_answered_with_the_extra_that_brings_it(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.delitem(sys.modules, "carnelian_perf.server.memory", raising=False)
    status, _, err = call(main, "memory")
    assert status == 1
    how = "install carnelian-perf's extra memory, as perf/README.md says"
    assert err == f"carnelian-perf: psutil is needed for this; {how}\n"


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("infer", "onnx", "batching"),
        ("hourglass", "carnelian_export", "training"),
        ("sweep", "carnelian_serving", "sweep"),
        ("sweep", "carnelian_export", "batching"),  # of a grid with random weights
        ("accuracy", "carnelian_export", "batching"),
    ],
)
def test_an_extra_is_that_of_the_command_or_brings_the_export(command, missing, extra, call, monkeypatch):
    error = ModuleNotFoundError(name=missing)
    monkeypatch.setattr("carnelian_perf.cli.app", Mock(side_effect=error))
    assert f"carnelian-perf's extra {extra}," in call(main, command)[2]


def test_the_page_has_the_same_commands_for_each_extra():
    rows = re.findall(r"^\| `([a-z]+)` \| (.+?) \|", (ROOT / "perf" / "README.md").read_text(), re.MULTILINE)
    on_page = {extra: set(re.findall(r"`([a-z0-9-]+)`", commands)) for extra, commands in rows}
    assert {extra: on_page[extra] for extra in EXTRAS} == {extra: set(names) for extra, names in EXTRAS.items()}
    assert {name for names in EXTRAS.values() for name in names} < typer.main.get_command(app).commands.keys()


@pytest.mark.parametrize("distribution", ["carnelian_export", "carnelian_perf", "carnelian_training"])
def test_an_error_without_words_is_told_by_its_name(distribution, call, monkeypatch):
    """As `asyncio.wait_for` raises one when the time is over."""
    cli = import_module(f"{distribution}.cli")
    monkeypatch.setattr(cli, "app", Mock(side_effect=TimeoutError))
    status, _, err = call(cli.main)
    assert status == 1
    assert err.endswith(": TimeoutError\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_made_goes_when_the_command_is_ended(number, tmp_path, call, monkeypatch):
    """As Kubernetes ends a job, or a closed terminal."""

    def work():
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)

    signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr("carnelian_perf.cli.app", work)
    assert call(main)[0] == 1
    assert not list(tmp_path.iterdir())


def test_under_nohup_the_command_outlives_its_terminal(call, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("carnelian_perf.cli.app", lambda: sys.exit(signal.raise_signal(signal.SIGHUP)))
    assert call(main)[0] == 0
