"""Training and perf each have a writer of whole files, for neither needs the other; both do the same."""

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from carnelian_perf import whole_file
from carnelian_perf.whole_file import write_whole
from carnelian_training import replacement
from carnelian_training.replacement import replaced

TIMES = 100
"""Each of two threads writes; with one name for both, every fifth time failed."""


def write_replaced(path: Path, content: str) -> None:
    with replaced(path) as partial:
        partial.write_text(content)


WRITERS = [write_replaced, write_whole]
CODE = """
import sys
from pathlib import Path
from carnelian_perf.whole_file import write_whole
from test_whole_file import write_replaced
print("before", flush=True)
{}(Path(sys.argv[1]), "written\\n")
print("after")
"""


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_that_is_a_file_keeps_what_it_holds(tmp_path, write, mode, name):
    """The file was replaced: yesterday's lines went, and so did all that the command printed."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    log = tmp_path / "log.txt"
    log.write_text("yesterday\n")
    with log.open(mode) as output:
        command = [sys.executable, "-c", CODE.format(write.__name__), tmp_path / name]
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, stdout=output, check=True, env=os.environ | {"PYTHONPATH": paths})
    assert log.read_text() == ("yesterday\n" if mode == "a" else "") + "before\nwritten\nafter\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "log.txt"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_gets_the_whole_file(tmp_path, write):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write, args=(tmp_path / "pipe", "written"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "written"
    writer.join()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_who_may_read_a_file_stays_as_it_was(tmp_path, write, mode):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(mode)
    write(tmp_path / "a", "new")
    assert ((tmp_path / "a").read_text(), (tmp_path / "a").stat().st_mode & 0o777) == ("new", mode)


def test_nobody_reads_meanwhile_what_is_kept_from_them(tmp_path):
    (tmp_path / "a").touch(0o600)
    with replaced(tmp_path / "a") as partial:
        partial.write_text("new")
        assert partial.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("write", WRITERS)
def test_two_that_write_one_file_do_not_meet(tmp_path, write):
    """The number of the process was the name of both, as it is of two containers' that share a folder."""
    failures = []

    def write_often(text):
        try:
            for _ in range(TIMES):
                write(tmp_path / "a", text)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write_often, args=(letter * 1000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set((tmp_path / "a").read_text()) in ({"a"}, {"b"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["is_stream", "_behind"])
def test_both_know_a_stream_by_the_same_code(name):
    assert inspect.getsource(getattr(whole_file, name)) == inspect.getsource(getattr(replacement, name))
