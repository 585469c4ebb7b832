"""Which tritonserver is found, and what keeps the wheel's from being prepared."""

import subprocess
import sys

import pytest
from carnelian_serving.installation import InstallationError, find_libpython, find_native, prepare_wheel


def test_a_scratch_where_nothing_may_run_is_refused(mount_tmpfs):
    with pytest.raises(InstallationError, match="may not run there"):
        prepare_wheel(mount_tmpfs("noexec"))


def test_a_scratch_without_room_is_named_with_its_variable(mount_tmpfs):
    scratch = mount_tmpfs("size=1m") / "scratch"
    scratch.mkdir()
    with pytest.raises(InstallationError, match=rf"in {scratch.parent}, but there is too little \(No space .*TMPDIR"):
        prepare_wheel(scratch)


def test_a_limit_below_the_backends_size_is_named(tmp_path):
    script = f"""
import resource
from pathlib import Path
from carnelian_serving.installation import InstallationError, prepare_wheel
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try: prepare_wheel(Path({str(tmp_path)!r}))
except InstallationError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"to {tmp_path.parent}, but no file may be so large (`ulimit -f`" in done.stdout


def test_an_environment_whose_path_stubs_cannot_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", "/home/josé/.venv")
    with pytest.raises(InstallationError, match="paths as ASCII"):
        prepare_wheel(tmp_path)


def test_a_missing_libpython_is_told_with_its_package(tmp_path):
    with pytest.raises(InstallationError, match=r"apt-get install libpython3\.99"):
        find_libpython("3.99", [tmp_path])
    library = tmp_path / "libpython3.99.so.1.0"
    library.touch()
    assert find_libpython("3.99", [tmp_path]) == library


def test_a_folder_that_may_not_be_read_has_no_libpython(everyones, another_user):
    """As where Python was built in the home of root."""
    closed = everyones / "closed"
    for folder in (closed, everyones):
        folder.mkdir(exist_ok=True)
        (folder / "libpython3.99.so.1.0").touch()
    closed.chmod(0)
    with another_user():
        assert find_libpython("3.99", [closed, everyones]) == everyones / "libpython3.99.so.1.0"


def test_a_native_installation_needs_every_backend(tmp_path):
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch()
    for name in ("dali", "onnxruntime", "python"):
        assert find_native(str(binary), tmp_path / "elsewhere") is None
        (tmp_path / "backends" / name).mkdir(parents=True)
        (tmp_path / "backends" / name / f"libtriton_{name}.so").touch()
    assert find_native(str(binary), tmp_path / "elsewhere") == binary
    assert find_native(None, tmp_path) == binary
