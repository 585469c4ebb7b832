import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from carnelian_serving.endings import Crash, describe_crash
from carnelian_serving.stubs import StubWatch, end_orphans

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@pytest.fixture
def start_stub(tmp_path):
    """Starts children of this process with the name and the command line of a stub of the model `cut`."""
    program = tmp_path / "cut" / "1" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text("print(flush=True); input()")
    executable = tmp_path / "triton_python_backend_stub"
    executable.symlink_to(sys.executable)
    started = []

    def start(instance="cut_0_0"):
        arguments = [executable.name, program, *"234567", instance]
        process = subprocess.Popen(arguments, executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def stub(start_stub):
    return start_stub()


def end(stub: subprocess.Popen[bytes]) -> None:
    stub.kill()
    os.waitid(os.P_PID, stub.pid, os.WEXITED | os.WNOWAIT)  # and leave it uncollected


def test_a_stub_that_stays_uncollected_has_crashed(stub):
    watch = StubWatch(os.getpid())
    assert watch.crashed() == []
    end(stub)
    assert watch.crashed() == []
    assert watch.crashed() == [Crash("cut_0_0", -signal.SIGKILL)]


@pytest.fixture
def start_loading_stub(start_stub, wait_until):
    """Starts a stub as Triton loads an instance: in a thread of its own, which the returned function ends."""
    with ThreadPoolExecutor(1) as pool:

        def start():
            thread = pool.submit(threading.get_native_id).result()
            stub = pool.submit(start_stub).result()

            def finish_loading():
                pool.shutdown()
                wait_until(lambda: not Path(f"/proc/self/task/{thread}").exists())

            return stub, finish_loading

        yield start


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_crash_is_spared_and_told_once_while_its_instance_loads(start_loading_stub, is_loaded, is_seen):
    told = []
    watch = StubWatch(os.getpid())
    watch.spare_loads(told.append)
    stub, finish_loading = start_loading_stub()
    if is_loaded:
        finish_loading()
    if is_seen:
        watch.crashed()
    end(stub)
    crash = Crash("cut_0_0" if is_seen else "an unnamed model", -signal.SIGKILL)
    watch.crashed()
    assert [watch.crashed(), watch.crashed()] == [[crash] * is_loaded] * 2
    assert told == [crash] * (not is_loaded)


def test_a_crash_that_was_spared_counts_when_its_instance_is_loaded_after_all(start_loading_stub):
    watch = StubWatch(os.getpid())
    watch.spare_loads([].append)
    stub, finish_loading = start_loading_stub()
    end(stub)
    assert [watch.crashed(), watch.crashed()] == [[], []]
    finish_loading()
    assert watch.crashed() == [Crash("an unnamed model", -signal.SIGKILL)]


def test_a_stub_that_gets_the_number_of_an_ended_one_has_its_own_name_and_end(tmp_path, monkeypatch):
    """The kernel gives a number again only after all others."""
    monkeypatch.setattr("carnelian_serving.stubs._PROC", tmp_path)
    (tmp_path / "1" / "task" / "2").mkdir(parents=True)
    (tmp_path / "1" / "task" / "2" / "children").write_text("7 ")
    told, names = [], ["cut_0_0", "double_0_0"]
    watch = StubWatch(1)
    watch.spare_loads(told.append)
    for name in names:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "cmdline").write_text("\0".join(["triton_python_backend_stub", "model.py", *"234567", name]))
        for state in ("S", "Z", "Z"):
            (tmp_path / "7" / "stat").write_text(f"7 (triton_python_b) {state} 1 {'0 ' * 47}9\n")
            watch.crashed()
        shutil.rmtree(tmp_path / "7")
        watch.crashed()
    assert told == [Crash(name, -signal.SIGKILL) for name in names]


def test_the_name_of_an_instance_may_be_no_utf_8(start_stub):
    name = os.fsdecode(b"gr\xfcn_0_0")
    watch = StubWatch(os.getpid())
    stub = start_stub(name)
    watch.crashed()
    end(stub)
    watch.crashed()
    assert watch.crashed() == [Crash(name, -signal.SIGKILL)]


def test_a_stub_that_stays_stopped_stands_still(stub):
    watch = StubWatch(os.getpid())
    watch.crashed()
    assert watch.stopped(1) == []
    stub.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stub.pid, os.WSTOPPED | os.WNOWAIT)
    assert [watch.stopped(2), watch.stopped(2)] == [[], ["cut_0_0"]]
    stub.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, stub.pid, os.WCONTINUED | os.WNOWAIT)
    assert watch.stopped(2) == []
    stub.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stub.pid, os.WSTOPPED | os.WNOWAIT)
    assert watch.stopped(2) == []


def test_a_stub_that_a_debugger_holds_stands_still(stub):
    watch = StubWatch(os.getpid())
    watch.crashed()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, stub.pid, None, None) != 0:
        pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitid(os.P_PID, stub.pid, os.WSTOPPED)  # collected, or Popen would take the stop for the end
    try:
        assert watch.stopped(1) == ["cut_0_0"]
    finally:
        libc.ptrace(PTRACE_DETACH, stub.pid, None, None)
    assert watch.stopped(1) == []


def test_memory_that_has_run_out_is_said_of_a_process_that_was_killed_alone():
    assert "memory has run out" in describe_crash([Crash("cut_0_0", -signal.SIGKILL)])
    assert describe_crash([Crash("SIGKILL_0_0", 1), Crash("cut_0_0", -signal.SIGRTMIN)]) == (
        "the process of SIGKILL_0_0 (status 1), cut_0_0 (SIGRTMIN) has crashed"
    )


def test_a_stub_that_has_just_crashed_is_told_from_one_that_triton_unloads(stub):
    watch = StubWatch(os.getpid())
    assert watch.crashed_by_now() == []
    end(stub)
    assert watch.crashed_by_now() == [Crash("cut_0_0", -signal.SIGKILL)]


def test_a_stub_that_triton_unloads_is_not_taken_for_crashed(stub):
    """Between its end and Triton's `waitpid` it looks like one."""
    watch = StubWatch(os.getpid())
    watch.crashed()
    end(stub)
    assert watch.crashed() == []
    stub.wait()
    assert stub.returncode == -signal.SIGKILL
    assert watch.crashed() == []


@pytest.mark.parametrize(
    ("parent", "region", "is_ours", "status"),
    [
        ("init", "stubs_of_this_test_1_2_", True, 9),
        ("tritonserver", "stubs_of_this_test_1_2_", True, 0),
        ("init", "triton-1-2-", True, 0),
        pytest.param("init", "stubs_of_this_test_1_2_", False, 0, marks=only_root),
    ],
)
def test_stubs_of_ours_that_have_no_server_are_ended(tmp_path, another_user, parent, region, is_ours, status):
    (tmp_path / "stub.py").write_text("print(flush=True); input()")
    (tmp_path / parent).symlink_to(sys.executable)
    command = ["triton_python_backend_stub", str(tmp_path / "stub.py"), region, *"34567", "cut_0_0"]
    code = f"import subprocess, sys; sys.exit(abs(subprocess.call({command}, executable={sys.executable!r})))"
    process = subprocess.Popen([tmp_path / parent, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    with contextlib.nullcontext() if is_ours else another_user():
        end_orphans("stubs_of_this_test_")  # "carnelian_" is ended by every server that starts meanwhile
    process.communicate(b"\n")
    assert process.returncode == status


def test_a_stopped_process_that_is_no_child_of_the_server_is_none_of_its_stubs(stub):
    """Triton starts and ends stubs to read configurations, and the number of one may be another process's now."""
    watch = StubWatch(os.getpid())
    watch.crashed()
    stub.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stub.pid, os.WSTOPPED | os.WNOWAIT)
    with subprocess.Popen(["sleep", "60"]) as server:
        watch._server_pid = server.pid
        assert watch.stopped(1) == []
        server.kill()
