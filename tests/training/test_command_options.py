import re
from pathlib import Path

import pytest
import typer
from carnelian_training.cli import main
from carnelian_training.command_options import check_writable


@pytest.mark.parametrize("name", ["", "a.txt"])
@pytest.mark.parametrize(
    "command",
    [
        ["fit", "a.yaml", "--out"],
        ["surroundings"],
        ["synthesise", "--hours", 1],
        ["perturb", "--speed", 1.1, "a.jsonl"],
        ["prepare", "librispeech"],
        ["to-huggingface", "a.pt"],
    ],
    ids=lambda command: command[0],
)
def test_what_is_no_folder_is_wrong_use(tmp_path, call, monkeypatch, command, name):
    """The variable of a shell that is not set: files came into the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    status, _, err = call(main, *command, name)
    assert (status, "must be a folder" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_device_is_no_folder(call):
    status, _, err = call(main, "fit", "a.yaml", "--out", "/dev/full")
    assert (status, "must be a folder, but /dev/full is a file" in err) == (2, True)


def test_a_new_file_needs_a_folder_that_can_be_written(everyones, another_user):
    """It takes the place of the old one, so that leave to write the old one is not enough."""
    (everyones / "old").touch()
    (everyones / "old").chmod(0o666)
    everyones.chmod(0o555)
    for name in ("old", "new", "folder/new"):
        message = f"{re.escape(str(everyones))} is in the way of {re.escape(str(everyones / name))}"
        with another_user(), pytest.raises(typer.BadParameter, match=message):
            check_writable(everyones / name)
    everyones.chmod(0o777)
    with another_user():
        assert all(check_writable(everyones / name) for name in ("old", "new", "folder/new"))


def test_a_file_that_is_kept_from_writing_is_not_replaced(everyones, another_user):
    (everyones / "kept").touch()
    (everyones / "kept").chmod(0o444)
    with another_user(), pytest.raises(typer.BadParameter, match="kept is in the way"):
        check_writable(everyones / "kept")


def test_an_open_file_needs_no_folder(everyones, another_user):
    with (everyones / "log").open("w") as file:
        everyones.chmod(0o555)
        (everyones / "log").chmod(0o666)
        with another_user():
            assert check_writable(Path(f"/dev/fd/{file.fileno()}"))
