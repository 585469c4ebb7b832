"""`setup/venv`, which `make` runs before it uses the virtual environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "setup" / "venv"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), ".venv", *(arguments or [sys.executable])]
    environment = os.environ | {"PIP_NO_INDEX": "1"}  # what ensurepip brings is new enough
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    without_pip = [sys.executable, "-m", "venv", "--without-pip", ".venv"]
    subprocess.run(without_pip, cwd=folder, check=True)
    (folder / ".venv" / ".begun").touch()  # as after a kill
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_one_that_was_cut_short_is_made_again(clone):
    pip = subprocess.run([clone / ".venv/bin/pip", "--version"], capture_output=True, text=True, check=True)
    assert str(clone) in pip.stdout
    again = run(clone)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_copy_of_it_is_refused(clone, tmp_path):
    """Its commands ran the code of the folder that it was copied from."""
    shutil.copytree(clone / ".venv", tmp_path / ".venv", symlinks=True)
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f".venv was made in {clone}, and")
    assert "run `make clean` first" in done.stderr


def test_one_without_a_record_gets_it_if_it_was_made_here(clone, tmp_path):
    shutil.copytree(clone / ".venv", tmp_path / ".venv", symlinks=True)
    for folder, status in ((clone, 0), (tmp_path, 1)):
        (folder / ".venv" / ".made-in").unlink()
        assert run(folder).returncode == status
    assert (clone / ".venv" / ".made-in").read_text() == f"{clone.resolve()}\n"


def test_one_from_a_folder_below_is_not_taken_for_one_of_here(clone, tmp_path):
    shutil.copytree(clone / ".venv", tmp_path / ".venv", symlinks=True)
    (tmp_path / ".venv" / ".made-in").unlink()
    pip = tmp_path / ".venv" / "bin" / "pip"
    pip.write_text(pip.read_text().replace(str(clone), str(tmp_path / "below")))
    assert run(tmp_path).returncode == 1


def test_what_it_did_not_make_is_not_emptied(tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "notes").write_text("dear")
    done = run(tmp_path)
    assert (done.returncode, "is not one that was made here" in done.stderr) == (1, True)
    assert (tmp_path / ".venv" / "notes").read_text() == "dear"


def test_one_without_its_interpreter_is_refused(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "vanished")
    (tmp_path / ".venv" / ".made-in").write_text(f"{tmp_path}\n")
    done = run(tmp_path)
    assert (done.returncode, "has lost its Python" in done.stderr) == (1, True)


def test_another_python_than_its_own_is_refused_where_it_was_asked_for(clone, tmp_path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    assert run(clone, str(other)).returncode == 0
    assert run(clone, sys.executable, "asked").returncode == 0
    done = run(clone, str(other), "asked")
    assert done.returncode == 1
    assert f"not 3.9 (PYTHON={other})" in done.stderr
