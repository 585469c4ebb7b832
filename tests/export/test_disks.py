"""What exports do on disks that are full, mounted, read-only or used by others."""

import dataclasses
import errno
import fcntl
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from carnelian_export import repository, staging
from carnelian_export.repository import write_model
from carnelian_export.stages import RepositoryError
from carnelian_export.target import Target
from carnelian_export.tuning import StageTuning
from carnelian_training.checkpoint import build_model
from carnelian_training.replacement import WriteError


def forbid(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lets nobody make temporary folders in a place; returns a list of the places where they are made."""
    make, places = tempfile.mkdtemp, []

    def make_elsewhere(suffix, prefix, folder):
        if folder == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        places.append(folder)
        return make(suffix, prefix, folder)

    monkeypatch.setattr(tempfile, "mkdtemp", make_elsewhere)
    return places


def test_a_mounted_volume_is_a_repository_too(mount_tmpfs, config, network, folders):
    volume = mount_tmpfs()
    for _ in range(2):
        write_model(volume, "tiny", config, network)
        assert sorted(p.name for p in volume.iterdir()) == folders


@pytest.mark.parametrize(
    ("tuning", "place"), [({}, "audio_decode"), ({"decode": StageTuning(instances=2)}, ".carnelian-export-*")]
)
def test_a_server_finds_no_half_model_on_a_mounted_volume(
    mount_tmpfs, config, network, monkeypatch, tuning, place, folders
):
    """Triton loads each folder of a repository, hidden ones too, and starts with none if one of them is no model."""
    volume = mount_tmpfs()
    write_model(volume, "tiny", config, network)
    places = []
    monkeypatch.setattr(repository, "write_acoustic", lambda folder, *_: places.append(folder) or 0.0)
    write_model(volume, "tiny", config, network, target=Target(tuning=tuning))
    assert fnmatch.fnmatch(places[0].relative_to(volume).parts[0], place)
    assert sorted(p.name for p in volume.iterdir()) == folders
    assert not list(volume.glob("*/.*"))


def test_a_part_of_a_disk_that_is_mounted_again_is_a_repository_too(tmp_path, config, network, folders):
    """The system gives both the same device, but moves nothing from one mount to the other."""
    volume = tmp_path / "r"
    volume.mkdir()
    done = subprocess.run(["mount", "--bind", volume, volume], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        for _ in range(2):
            write_model(volume, "tiny", config, network)
            assert sorted(p.name for p in volume.iterdir()) == folders
        assert list(tmp_path.iterdir()) == [volume]
    finally:
        subprocess.run(["umount", volume], check=True)


def test_a_repository_that_is_read_only_is_named(mount_tmpfs, config, network):
    volume = mount_tmpfs("ro")
    with pytest.raises(WriteError, match=rf"^{volume} could not be written: Read-only file system: "):
        write_model(volume, "tiny", config, network)


def test_only_the_repository_itself_need_be_writable(tmp_path, config, network, monkeypatch, folders):
    (tmp_path / "r").mkdir()
    places = forbid(tmp_path, monkeypatch)
    for expected in (tmp_path / "r", tmp_path / "r" / "audio_decode"):
        write_model(tmp_path / "r", "tiny", config, network)
        assert expected in places
        assert tmp_path not in places
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == folders


def test_ctrl_c_while_folders_are_replaced_comes_too_late(tmp_path, config, network, monkeypatch, folders):
    """It came between the old folder's leaving and the new one's coming, and both were gone."""
    write_model(tmp_path / "r", "tiny", config, network)
    rename = Path.rename

    def interrupted(path, target):
        rename(path, target)
        if path == tmp_path / "r" / "tiny_ctc":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Path, "rename", interrupted)
    write_model(tmp_path / "r", "tiny", config, network)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == folders


def test_the_disk_holds_all_of_a_model_before_a_server_can_find_it(tmp_path, config, network, monkeypatch):
    held, fsync = set(), os.fsync

    def note(descriptor):
        fsync(descriptor)
        assert not list((tmp_path / "r").iterdir())
        held.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    write_model(tmp_path / "r", "tiny", config, network)
    assert {path.stat().st_ino for path in (tmp_path / "r").rglob("*") if path.is_file()} <= held


def test_a_disk_without_room_is_named_and_the_old_model_stays(tmp_path, room, config, network, contents):
    write_model(tmp_path / "r", "tiny", config, network)
    before = contents(tmp_path)
    with room(1000), pytest.raises(WriteError, match=r"r/tiny could not be written, and is as it was before: "):
        write_model(tmp_path / "r", "tiny", config, network)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("inside", [False, True])
def test_exports_into_one_repository_take_turns(tmp_path, config, network, monkeypatch, inside):
    """The one that ended first deleted the work of the other, in a folder of its model; or their renames mixed."""
    if inside:
        (tmp_path / "r").mkdir()
        forbid(tmp_path, monkeypatch)
    rename, refused = Path.rename, []

    def meanwhile(step):
        handle = os.open(tmp_path / "r", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what the other would wait for
        os.close(handle)
        refused.append(step)

    monkeypatch.setattr(repository, "write_acoustic", lambda *_: meanwhile("export") or 0.0)
    monkeypatch.setattr(Path, "rename", lambda path, target: meanwhile("rename") or rename(path, target))
    write_model(tmp_path / "r", "tiny", config, network)
    assert refused == ["export", *["rename"] * 6]


@pytest.fixture
def other_export(tmp_path, monkeypatch):
    """Lets another export hold the repository `r`; `end(act)` acts and ends it once the tested one waits."""
    (tmp_path / "r").mkdir()
    handle, said = os.open(tmp_path / "r", os.O_RDONLY), []
    fcntl.flock(handle, fcntl.LOCK_EX)

    def end(act=lambda: None):
        def warn(message, *values):
            monkeypatch.undo()
            said.append(message % values)
            os.close(handle)
            act()

        monkeypatch.setattr(staging.logger, "warning", warn)
        return said

    return end


def test_an_export_says_what_it_waits_for(tmp_path, config, network, other_export):
    said = other_export()
    write_model(tmp_path / "r", "tiny", config, network)
    assert said == [f"another export writes into {tmp_path / 'r'}: waiting until it has ended"]


def test_a_release_that_another_export_has_put_there_meanwhile_stays(tmp_path, config, network, other_export):
    other = dataclasses.replace(config, labels=config.labels[::-1])
    other_export(lambda: write_model(tmp_path / "r", "tiny", other, network))
    with pytest.raises(RepositoryError, match="has other values of labels"):
        write_model(tmp_path / "r", "tiny", config, network)
    assert json.loads((tmp_path / "r" / "tiny_ctc" / "1" / "ctc.json").read_text())["labels"] == list(other.labels)


def test_a_repository_that_a_failed_export_has_removed_is_made_anew(tmp_path, config, network, other_export, folders):
    other_export((tmp_path / "r").rmdir)
    write_model(tmp_path / "r", "tiny", config, network)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == folders


def test_an_export_that_fails_removes_a_repository_that_it_made_anew(tmp_path, config, other_export):
    other_export((tmp_path / "r").rmdir)
    with pytest.raises(ValueError, match="evaluation mode"):
        write_model(tmp_path / "r", "tiny", config, build_model(config))
    assert not (tmp_path / "r").exists()


def test_a_repository_that_is_removed_as_it_is_opened_is_made_anew(tmp_path, config, network, monkeypatch, folders):
    def open_removed(path, flags):
        monkeypatch.undo()
        path.rmdir()
        return os.open(path, flags)

    monkeypatch.setattr(os, "open", open_removed)
    write_model(tmp_path / "r", "tiny", config, network)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == folders


def test_an_export_that_fails_leaves_no_folder_that_it_made(tmp_path, config):
    (tmp_path / "old").mkdir()
    for repository_path in (tmp_path / "old" / "new" / "r", tmp_path / "old"):
        with pytest.raises(ValueError, match="evaluation mode"):
            write_model(repository_path, "tiny", config, build_model(config))
    assert not list((tmp_path / "old").iterdir())


def test_a_full_folder_of_temporary_files_is_named(tmp_path, mount_tmpfs, config, network, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(mount_tmpfs("size=8k")))
    with pytest.raises(WriteError, match=r"r/tiny could not be written, .*/mounted/tmp\w+ could not .* No space left"):
        write_model(tmp_path / "r", "tiny", config, network)
    assert not (tmp_path / "r").exists()


def test_a_folder_that_cannot_be_replaced_leaves_all_as_they_were(tmp_path, config, network, contents, folders):
    """The ensembles and the acoustic stage were new then, the decoder was old."""
    write_model(tmp_path / "r", "tiny", config, network)
    shutil.rmtree(tmp_path / "r" / "tiny_ctc")
    (tmp_path / "r" / "tiny_ctc").symlink_to(tmp_path / "not_mounted")
    before = contents(tmp_path)
    torch.manual_seed(1)
    with pytest.raises(WriteError, match=r"r/tiny could not be written, and is as it was before: .*/r/tiny_ctc'"):
        write_model(tmp_path / "r", "tiny", config, build_model(config).eval())
    assert contents(tmp_path) == before
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == folders
