import pytest
from carnelian_training.cli import main


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
