import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from carnelian_export import repository
from carnelian_export.cli import main
from carnelian_export.model_configs import read_config
from carnelian_export.stages import Decoding
from carnelian_training.config import LABELS

REFERENCES = Path(__file__).parents[1] / "training" / "references"


def test_a_checkpoint_becomes_a_model(checkpoint, tmp_path, call):
    status, out, err = call(main, checkpoint, "--name", "tiny", "--repository", tmp_path / "r")
    assert status == 0, err
    assert "tiny and tiny_pcm are in" in out
    assert (tmp_path / "r" / "tiny_acoustic" / "1" / "model.onnx").is_file()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--precision", "fp64"),
        ("--execution-provider", "rocm"),
        ("--precision", "int8"),
        ("--format", "openvino"),
        ("--option", "beam_width"),
        ("--int8-clips", "clips.jsonl"),  # for fp32
        ("--timing-cache", "cache"),  # for ONNX
    ],
)
def test_what_is_not_there_or_does_not_fit_is_refused_by_name(checkpoint, tmp_path, call, option, value):
    status, _, err = call(main, checkpoint, "--name", "tiny", "--repository", tmp_path / "r", option, value)
    assert status == 2
    assert value in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [("beam_width=abc", "beam_width must be a whole number"), ("nosuch=1", "an option must be one of")],
)
def test_a_wrong_option_of_the_decoder_is_wrong_use(checkpoint, tmp_path, call, option, words):
    arguments = ["--name", "tiny", "--repository", tmp_path / "new" / "r", "--option", option]
    status, _, err = call(main, checkpoint, *arguments)
    assert (status, words in err) == (2, True)
    assert not (tmp_path / "new").exists()


NGRAMS = Path(__file__).parents[2] / "model_repository" / "quartznet_demo_ctc" / "1" / "english.klm"


@pytest.mark.parametrize("option", ["--lm", "--neural-lm", "--lm-weights", "--calibration", "--tuning"])
def test_another_file_is_refused_in_few_words(checkpoint, tmp_path, call, option):
    """What was no file of weights and no calibration was quoted whole: 18 MB on the terminal."""
    arguments = ["--name", "tiny", "--repository", tmp_path / "r", option, checkpoint]
    status, _, err = call(main, checkpoint, *arguments)
    assert status in (1, 2)
    assert "tiny.pt" in err
    assert len(err) < 1000
    assert not (tmp_path / "r").exists()


def test_a_calibration_that_is_not_there_is_named(checkpoint, tmp_path, call):
    """It was called a repository that could not be written."""
    arguments = ["--name", "tiny", "--repository", tmp_path / "r", "--calibration", tmp_path / "nowhere.json"]
    status, _, err = call(main, checkpoint, *arguments)
    assert status == 1
    assert (
        f"{tmp_path / 'nowhere.json'} must be a file of `carnelian-perf words`, but it cannot be read: No such file"
        in err
    )
    assert "could not be written" not in err


@pytest.mark.parametrize("option", ["--lm", "--neural-lm"])
def test_a_language_model_that_is_not_there_is_named(checkpoint, tmp_path, call, option):
    """A neural one was called a model that could not be written."""
    arguments = ["--name", "tiny", "--repository", tmp_path / "r", option, tmp_path / "nowhere.lm"]
    status, _, err = call(main, checkpoint, *arguments)
    assert status == 1
    assert err.startswith(f"carnelian-export: {tmp_path / 'nowhere.lm'} must be an ")
    assert "could not be written" not in err


def test_a_damaged_language_model_is_named(checkpoint, tmp_path):
    """KenLM follows what such a file says to anywhere in memory: SIGSEGV ended the command, without a word."""
    damaged = bytearray(NGRAMS.read_bytes())
    damaged[141] ^= 4
    (tmp_path / "lm.klm").write_bytes(damaged)
    arguments = ["--name", "tiny", "--repository", tmp_path / "r", "--lm", tmp_path / "lm.klm"]
    export = [sys.executable, "-c", "from carnelian_export.cli import main; main()", checkpoint, *arguments]
    done = subprocess.run(export, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'lm.klm'} is damaged" in done.stderr


def test_a_language_model_with_damaged_numbers_is_named(checkpoint, tmp_path, call):
    """KenLM loads it, and gives NaN for what words cost: it was exported and served."""
    damaged = bytearray(NGRAMS.read_bytes())
    damaged[400_000:600_000] = b"\xff" * 200_000
    (tmp_path / "lm.klm").write_bytes(damaged)
    arguments = ["--name", "tiny", "--repository", tmp_path / "r", "--lm", tmp_path / "lm.klm"]
    status, _, err = call(main, checkpoint, *arguments)
    assert status == 1
    assert f"{tmp_path / 'lm.klm'} must give each word a logarithm of 0 at most" in err
    assert not (tmp_path / "r").exists()


def test_a_language_model_that_memory_has_run_out_for_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert Decoding(language_model=NGRAMS).parameters(LABELS)["language_model"] == NGRAMS.name


def test_an_option_comes_before_a_file_of_weights(checkpoint, tmp_path, call):
    (tmp_path / "weights.json").write_text('{"options": {"lm_weight": 0.25, "word_score": 2.0}}')
    weights = ["--lm", NGRAMS, "--lm-weights", tmp_path / "weights.json", "--option", "lm_weight=0.75"]
    assert call(main, checkpoint, "--name", "tiny", "--repository", tmp_path / "r", *weights)[0] == 0
    parameters = read_config(tmp_path / "r" / "tiny_ctc" / "config.pbtxt").parameters
    assert [parameters[name].string_value for name in ("lm_weight", "word_score")] == ["0.75", "2.0"]


def test_an_empty_path_is_no_folder(checkpoint, tmp_path, call, monkeypatch):
    """The variable of a shell that is not set: the model came into the working directory."""
    monkeypatch.chdir(tmp_path)
    status, _, err = call(main, checkpoint, "--name", "tiny", "--repository", "")
    assert (status, "folder" in err) == (2, True)


@pytest.mark.parametrize("option", ["--repository", "--out"])
def test_a_path_that_onnx_runtime_does_not_open_is_refused_at_once(checkpoint, tmp_path, call, option):
    """The export ended, when it was all but done, in a TypeError."""
    place = tmp_path / os.fsdecode(b"caf\xe9") / "r"
    status, _, err = call(main, checkpoint, "--name", "tiny", option, place)
    assert status == 2
    assert "LC_ALL=C.UTF-8" in err
    assert not place.parent.exists()


def test_an_address_is_no_folder(checkpoint, tmp_path, call, monkeypatch):
    """The model was in a new folder called `s3:`, and the export said that it was done."""
    monkeypatch.chdir(tmp_path)
    status, _, err = call(main, checkpoint, "--name", "tiny", "--repository", "s3://bucket/models")
    assert (status, "this must be a folder" in err, "is s3://bucket/models" in err) == (2, True, True), err
    assert not Path("s3:").exists()


def test_a_foreign_checkpoint_becomes_a_model_with_its_own_labels_and_features(tmp_path, call):
    status, _, err = call(main, REFERENCES / "jasper.nemo", "--name", "jasper", "--repository", tmp_path / "r")
    assert status == 0, err
    features = json.loads((tmp_path / "r" / "jasper_features" / "1" / "features.json").read_text())
    assert (features["edges"], features["frame_count"], features["std_guard"]) == ("zero", "floor", 1e-5)
    assert json.loads((tmp_path / "r" / "jasper_ctc" / "1" / "ctc.json").read_text())["labels"][-2:] == ["文", "字"]


def test_a_folder_without_a_model_fails_with_status_1(tmp_path, call):
    assert call(main, tmp_path, "--name", "q", "--repository", tmp_path / "r")[0] == 1


def test_a_broken_checkpoint_fails_with_status_1(tmp_path, call):
    (tmp_path / "broken.pt").write_bytes(b"broken")
    status, _, err = call(main, tmp_path / "broken.pt", "--name", "q", "--repository", tmp_path / "r")
    assert status == 1
    assert err.startswith(f"carnelian-export: {tmp_path / 'broken.pt'} cannot be read as a checkpoint")
    assert "weights_only" not in err  # PyTorch's advice is to run what the file says
    assert err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_leaves_nothing(checkpoint, tmp_path, call, monkeypatch, number):
    """As Kubernetes ends a job, or a closed terminal; what had been written stayed beside the repository."""
    signal.signal(number, signal.SIG_DFL)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(repository, "write_acoustic", lambda *_: signal.raise_signal(number))
    (tmp_path / "r").mkdir()
    assert call(main, checkpoint, "--name", "tiny", "--repository", tmp_path / "r")[0] == 1
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "r"])


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes another user's files")
def test_what_a_server_of_another_user_left_in_a_model_is_named_when_the_export_is_done(checkpoint, tmp_path, call):
    """Triton, as root in a container, leaves __pycache__ in a volume; the export had been done, and said it failed."""
    arguments = [checkpoint, "--name", "tiny", "--repository", tmp_path / "r"]
    assert call(main, *arguments)[0] == 0
    cache = tmp_path / "r" / "tiny_ctc" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").touch()
    os.chown(cache, 65534, 65534)
    export = [sys.executable, "-c", "from carnelian_export.cli import main; main()", *arguments]
    done = subprocess.run(["setpriv", "--bounding-set=-all", *export], capture_output=True, text=True, check=False)
    (left,) = tmp_path.glob(".carnelian-export-*")
    assert (done.returncode, done.stderr) == (
        0,
        f"{left} is left over, with files that this user may not delete: delete it as theirs\n",
    )
    assert not cache.exists()


def test_help_does_not_load_torch():
    code = "import carnelian_export.cli, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
