"""The folder of a run: one run's alone."""

import fcntl
import os
import stat

import pytest
from carnelian_training.loop import train
from carnelian_training.loop.run_folder import held
from carnelian_training.replacement import WriteError


def test_two_runs_do_not_share_a_folder(tiny_config, tmp_path):
    with held(tmp_path), pytest.raises(ValueError, match="another one works in it: wait for that, or take another"):
        train.train(tiny_config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_lock_of_a_folder_is_one_that_nfs_has(tmp_path, monkeypatch):
    """A regular file, open for writing: NFS makes a lock on bytes of it, which other machines see."""
    locks, flock = [], fcntl.flock

    def seen(handle, kind):
        flock(handle, kind)
        locks.append((os.fstat(handle).st_mode, fcntl.fcntl(handle, fcntl.F_GETFL)))

    monkeypatch.setattr(fcntl, "flock", seen)
    with held(tmp_path / "run"):
        pass
    ((mode, flags),) = locks
    assert stat.S_ISREG(mode)
    assert flags & os.O_RDWR
    assert not (tmp_path / "run").exists()  # nothing was written


def test_a_folder_that_cannot_be_written_is_named_without_the_number_of_an_error(everyones, another_user):
    (everyones / "run").mkdir()
    everyones.chmod(0o555)
    with another_user():
        for folder, place in (("run", everyones / "run" / ".lock"), ("new", everyones / "new")):
            with pytest.raises(WriteError) as error, held(everyones / folder):
                pass
            assert str(error.value) == f"{place} could not be written: Permission denied: '{place}'"


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_a_configuration_in_the_runs_folder_stays_as_it_was_written(tiny_config, changed, tmp_path, name):
    (tmp_path / f"{name}.yaml").write_text("# a comment")
    train.train(changed(tiny_config, loop={"steps": 1}), tmp_path, tmp_path / f"{name}.yaml")
    assert (tmp_path / f"{name}.yaml").read_text() == "# a comment"
    assert (tmp_path / "tiny.yaml").exists()
