"""What a killed server leaves is taken back by the next one of the same user, and nothing else is."""

import os
import secrets

import pytest
from carnelian_serving.installation import InstallationError
from carnelian_serving.shared_memory import remove_leftovers


@pytest.fixture
def leave(tmp_path, monkeypatch):
    """Makes what a killed server leaves, by how its names begin: a lock, a region, a scratch folder."""
    shared_memory = tmp_path / "shm"  # in the real one, any server that starts takes leftovers back
    shared_memory.mkdir()
    monkeypatch.setattr("carnelian_serving.shared_memory.SHARED_MEMORY", shared_memory)

    def make(prefix):
        folder = tmp_path / f"{prefix}_folder"
        folder.mkdir()
        lock, region = (shared_memory / f"{prefix}_{name}" for name in ("lock", "region"))
        lock.write_text(str(folder))
        region.touch()
        return [lock, region, folder]

    return make


def test_a_folder_that_is_not_the_servers_own_stays(tmp_path, leave):
    lock, region, folder = leave(f"carnelian_{secrets.randbelow(10**9)}_0123abcd")
    lock.write_text(str(tmp_path))
    remove_leftovers()
    assert [path.exists() for path in (lock, region, folder)] == [False, False, True]


@pytest.mark.parametrize(("token", "is_taken"), [("_0123abcd", True), ("_0123abc", False), ("", False)])
def test_only_what_has_a_servers_name_is_taken_back(leave, token, is_taken):
    made = leave(f"carnelian_{secrets.randbelow(10**9)}{token}")
    remove_leftovers()
    assert [path.exists() for path in made] == [not is_taken] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize(("foreign", "left"), [((0,), [0, 1, 2]), ((1, 2), [1, 2])], ids=["lock", "leftovers"])
def test_what_others_own_takes_nothing_back_and_is_left(leave, foreign, left):
    made = leave(f"carnelian_{secrets.randbelow(10**9)}_0123abcd")
    for index in foreign:
        os.chown(made[index], 65534, 65534)
    remove_leftovers()
    assert [index for index, path in enumerate(made) if path.exists()] == left


@pytest.mark.parametrize("needs_room", ["carnelian_serving.launcher.find_installation", "tempfile.mkdtemp"])
def test_leftovers_are_taken_back_before_a_start_needs_their_room(
    cut_repository, leave, monkeypatch, make_server, needs_room
):
    made = leave(f"carnelian_{secrets.randbelow(10**9)}_0123abcd")

    def refuse(*_, **__):
        raise InstallationError(f"left: {[path.exists() for path in made]}")

    monkeypatch.setattr(needs_room, refuse)
    with pytest.raises(InstallationError, match=r"left: \[False, False, False\]"):
        make_server(cut_repository).start()
