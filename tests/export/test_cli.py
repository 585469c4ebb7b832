import json
import subprocess
import sys
from pathlib import Path

import pytest
from carnelian_export.cli import app
from typer.testing import CliRunner

REFERENCES = Path(__file__).parents[1] / "training" / "references"


def export(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_checkpoint_becomes_a_model(checkpoint, tmp_path):
    result = export(checkpoint, "--name", "tiny", "--repository", tmp_path / "r")
    assert result.exit_code == 0, result.output
    assert "tiny and tiny_pcm are in" in result.output
    assert (tmp_path / "r" / "tiny_acoustic" / "1" / "model.onnx").is_file()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--precision", "fp64"), ("--execution-provider", "rocm"), ("--precision", "int8"), ("--format", "openvino")],
)
def test_what_is_not_there_is_refused_by_name(checkpoint, tmp_path, option, value):
    result = export(checkpoint, "--name", "tiny", "--repository", tmp_path / "r", option, value)
    assert result.exit_code == 2
    assert value in result.stderr
    assert not (tmp_path / "r").exists()


def test_a_foreign_checkpoint_becomes_a_model_with_its_own_labels_and_features(tmp_path):
    result = export(REFERENCES / "jasper.nemo", "--name", "jasper", "--repository", tmp_path / "r")
    assert result.exit_code == 0, result.output
    features = json.loads((tmp_path / "r" / "jasper_features" / "1" / "features.json").read_text())
    assert (features["edges"], features["frame_count"], features["std_guard"]) == ("zero", "floor", 1e-5)
    assert json.loads((tmp_path / "r" / "jasper_ctc" / "1" / "ctc.json").read_text())["labels"][-2:] == ["文", "字"]


def test_a_folder_without_a_model_fails_with_status_1(tmp_path):
    assert export(tmp_path, "--name", "q", "--repository", tmp_path / "r").exit_code == 1


def test_a_broken_checkpoint_fails_with_status_1(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"broken")
    command = [sys.executable, "-c", "from carnelian_export.cli import main; main()"]
    arguments = [str(tmp_path / "broken.pt"), "--name", "q", "--repository", str(tmp_path / "r")]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"carnelian-export: {tmp_path / 'broken.pt'} cannot be read as a checkpoint")
    assert "Traceback" not in result.stderr


def test_help_does_not_load_torch():
    code = "import carnelian_export.cli, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
