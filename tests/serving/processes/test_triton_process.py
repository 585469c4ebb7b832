"""The process of tritonserver: how it ends, by itself or when it is told to."""

import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from carnelian_serving.addresses import held_ports
from carnelian_serving.endings import has_ended
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import find_installation
from carnelian_serving.launcher import Server

DEAF_PARENT = [
    *(sys.executable, "-c"),
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); os.execv(sys.argv[1], sys.argv[1:])",
]
"""A program that hears of no child and heeds no SIGTERM, which those that it starts inherit."""


@pytest.mark.parametrize("parent", [[], DEAF_PARENT], ids=["", "deaf parent"])
def test_a_crashed_instance_ends_the_command_with_its_name(cut_repository, start_command, group_pids, parent):
    process, server = start_command(cut_repository, parent=parent)
    [stub] = [pid for pid in group_pids(server) if pid != server]
    os.kill(stub, signal.SIGSEGV)
    _, errors = process.communicate(timeout=25)  # below the half minute that Triton would wait for it
    assert process.returncode == 1
    assert "the process of cut_0_0 (SIGSEGV) has crashed" in errors
    assert not group_pids(server)


PYTHON_CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
IDLE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []"
CRASHES_ONCE_TOLD = """
import os, time
while not os.path.exists("{crash}"):
    time.sleep(0.05)
os.kill(os.getpid(), 11)
"""


@pytest.mark.parametrize(
    ("file", "options", "process_name"),
    [
        ("forgotten", [], "(an unnamed model|added)"),
        (CRASHES_ONCE_TOLD, [], "added"),
        (CRASHES_ONCE_TOLD, ["--disable-auto-complete-config"], "added_0_0"),
    ],
    ids=["no model.py", "helper", "instance"],
)
def test_a_model_that_crashes_as_it_is_added_leaves_the_others_serving(
    cut_repository, tmp_path, add_model, make_server, stubs_of, wait_until, file, options, process_name
):
    log = []
    options = ["--model-control-mode=poll", "--repository-poll-secs=1", *options]
    crash = tmp_path / "crash"
    name = "model.py" if file is CRASHES_ONCE_TOLD else "model.txt"
    added = add_model(tmp_path, "added", PYTHON_CONFIG, {name: file.format(crash=crash)})
    with make_server(cut_repository, triton_options=options, on_log=log.append) as server:
        added.rename(cut_repository / "added")
        if name == "model.py":
            wait_until(lambda: process_name in stubs_of(server))
        assert server._triton.stubs.crashed() == []
        crash.touch()
        wait_until(lambda: server._triton.stubs.crashed() or any("while others serve" in line for line in log))
        assert [server._triton.stubs.crashed() for _ in range(2)] == [[], []]
        [warning] = [line for line in log if "a model that is loaded while others serve" in line]
        assert re.search(rf"the process of {process_name} \(SIGSEGV\) has crashed; the others go on", warning)
        stubs_of(server)["cut_0_0"].send_signal(signal.SIGSEGV)
        with pytest.raises(ServerError, match=r"the process of cut_0_0 \(SIGSEGV\) has crashed"):
            server.wait()


@pytest.mark.parametrize(("is_seen", "process_name"), [(True, "added"), (False, "an unnamed model")])
def test_a_model_that_crashes_as_it_is_loaded_anew_goes_on_serving(
    cut_repository, tmp_path, add_model, make_server, stubs_of, wait_until, is_seen, process_name
):
    log = []
    crash = tmp_path / "crash"
    added = add_model(cut_repository, "added", PYTHON_CONFIG, {"model.py": IDLE})
    options = ["--model-control-mode=explicit", "--load-model=*"]
    server = make_server(cut_repository, exit_timeout_s=1, triton_options=options, on_log=log.append)
    with ThreadPoolExecutor() as pool, server:
        (added / "1" / "model.py").write_text(CRASHES_ONCE_TOLD.format(crash=crash))
        pool.submit(load, server, "added")  # which gets no answer
        wait_until(lambda: "added" in stubs_of(server))
        if is_seen:
            server._triton.stubs.crashed()
        crash.touch()
        children = psutil.Process(server.pid).children
        wait_until(lambda: any(child.status() == psutil.STATUS_ZOMBIE for child in children()))
        wait_until(lambda: server._triton.stubs.crashed() or any("while others serve" in line for line in log))
        assert [server._triton.stubs.crashed() for _ in range(2)] == [[], []]
        [warning] = [line for line in log if "a model that is loaded while others serve" in line]
        assert f"the process of {process_name} (SIGSEGV) has crashed; the others go on" in warning
        urllib.request.urlopen(f"http://{server.http_url}/v2/models/added/versions/1/ready", timeout=60).close()


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_crashed_instance_of_a_model_that_was_added_ends_the_server(
    cut_repository, add_model, make_server, stubs_of, wait_until, is_seen
):
    add_model(cut_repository, "added", PYTHON_CONFIG, {"model.py": IDLE})
    options = ["--model-control-mode=explicit", "--load-model=cut"]
    with make_server(cut_repository, triton_options=options) as server:
        load(server, "added")
        if is_seen:
            server._triton.stubs.crashed()
        stub = stubs_of(server)["added_0_0"]
        stub.send_signal(signal.SIGSEGV)
        wait_until(lambda: stub.status() == psutil.STATUS_ZOMBIE)
        wait_until(server._triton.stubs.crashed)
        name = "added_0_0" if is_seen else "an unnamed model"
        with pytest.raises(ServerError, match=rf"the process of {name} \(SIGSEGV\) has crashed"):
            server.wait()


def test_a_connection_ends_though_a_model_was_loaded_meanwhile(cut_repository, add_model, make_server):
    """The process of that model would hold it open."""
    add_model(cut_repository, "added", PYTHON_CONFIG, {"model.py": IDLE})
    with make_server(cut_repository, triton_options=["--model-control-mode=explicit", "--load-model=cut"]) as server:
        host, port = server.http_url.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as answer:
            load(server, "added")
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert answer.read().startswith(b"HTTP/1.1 200 OK")


def load(server: Server, model: str) -> None:
    url = f"http://{server.http_url}/v2/repository/models/{model}/load"
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()


def test_sigterm_is_heeded_though_the_parent_blocked_it(cut_repository, start_command):
    process, _ = start_command(cut_repository, parent=DEAF_PARENT)
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 0


def test_an_instance_that_stands_still_ends_the_server_with_its_name(
    cut_repository, monkeypatch, connect, group_pids, make_server
):
    monkeypatch.setattr("carnelian_serving.triton_process.STOPPED_CHECKS", 2)
    request = {"SIGNAL": np.ones((1, 4), np.float32), "LENGTH": np.full((1, 1), 2, np.int32)}
    with make_server(cut_repository) as server:
        group = server.pid
        [stub] = [pid for pid in group_pids(group) if pid != group]
        os.kill(stub, signal.SIGSTOP)
        [answer] = connect(server.grpc_url).infer_at_once("cut", [request])
        assert "Stub process 'cut_0_0' is not healthy" in str(answer)
        with pytest.raises(ServerError, match="the process of cut_0_0 stands still, as SIGSTOP or a debugger stops it"):
            server.wait()
        noticed = time.monotonic()
    assert time.monotonic() < noticed + 25  # Triton waits for half a minute, once a request has found it so
    assert not group_pids(group)


def test_a_stop_does_not_wait_for_whoever_reads_no_log(cut_repository, tmp_path, command_line, regions_of):
    os.mkfifo(tmp_path / "log")
    unread = os.open(tmp_path / "log", os.O_RDWR)
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    command = [*command_line, f"--repository={cut_repository}", "--log-level=verbose"]
    with (tmp_path / "log").open("w") as log:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=buffered)
    assert process.stdout.readline().startswith(b"carnelian-serve: ready")
    process.terminate()
    process.communicate(timeout=40)
    os.close(unread)
    assert process.returncode == 0
    assert not regions_of(process.pid)


def test_a_crash_ends_the_command_though_nobody_reads_what_it_prints(
    cut_repository, command_line, regions_of, wait_until
):
    unread, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4096)
    os.write(full, b"x" * 4096)
    with held_ports("127.0.0.1", {"--http-port": 0}) as ports:
        port = ports["--http-port"]
        command = [*command_line, f"--repository={cut_repository}", f"--http-port={port}"]
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        wait_until(lambda: is_ready(f"http://127.0.0.1:{port}/v2/health/ready"))
        [server] = psutil.Process(process.pid).children()
        server.kill()
        assert process.wait(timeout=30) == 1
    finally:
        process.kill()
        process.wait()
        os.close(full)
        os.close(unread)
    assert not regions_of(process.pid)


AMID_A_DESTRUCTOR = """
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

Dying()
"""
BEFORE_A_LOCK = """
lock = threading.Lock()
with contextlib.suppress(RuntimeError):  # as where no thread can be had
    try:
        signal.raise_signal(signal.SIGTERM)
        lock.acquire()
    finally:
        lock.release()
"""


@pytest.mark.parametrize(("owner", "method"), [("Server", "_is_ready"), ("cli", "_print_ready")])
@pytest.mark.parametrize("place", [AMID_A_DESTRUCTOR, BEFORE_A_LOCK], ids=["destructor", "lock"])
def test_a_signal_stops_the_server_wherever_it_comes(cut_repository, command_line, owner, method, place):
    """Python drops what a handler raises in a destructor, and waiting threads make an error about their lock of it."""
    script = f"""
import contextlib, signal, threading
from carnelian_serving import cli
from carnelian_serving.launcher import Server

def come(*arguments):
    exec({place!r}, globals())

{owner}.{method} = come
cli.app({[*command_line[1:], f"--repository={cut_repository}"]})
"""
    done = subprocess.run([*DEAF_PARENT, sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[1:] == ["carnelian-serve: stopping"]


@pytest.mark.parametrize(("owner", "method"), [("Server", "_is_ready"), ("cli", "_print_ready")])
def test_a_signal_to_the_whole_tree_stops_the_server_whoever_gets_it_first(cut_repository, command_line, owner, method):
    script = f"""
import os, signal, threading
from carnelian_serving import cli, launcher, triton_process
from carnelian_serving.launcher import Server

launcher.TOLD_TOGETHER_S = triton_process.TOLD_TOGETHER_S = 10.0  # however busy the machine is

def signal_all(*arguments):
    server = int(open("/proc/thread-self/children").read())
    os.kill(server, signal.SIGTERM)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGTERM]).start()

{owner}.{method} = signal_all
cli.app({[*command_line[1:], f"--repository={cut_repository}"]})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[1:] == ["carnelian-serve: stopping"]


def test_more_files_may_be_open_than_select_takes(cut_repository, start_command):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("the hard limit of this machine is lower")
    opener = [
        *(sys.executable, "-c"),
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048));"
        "[os.set_inheritable(os.dup(0), True) for _ in range(1100)]; os.execv(sys.argv[1], sys.argv[1:])",
    ]
    process, _ = start_command(cut_repository, parent=opener)
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 0


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def test_a_crashed_server_is_told_by_its_signal(cut_repository, start_command, regions_of):
    process, server = start_command(cut_repository)
    os.kill(server, signal.SIGABRT)  # whose handler writes a stack, with the help of child processes
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "tritonserver must run until it is told to end, but was ended by SIGABRT by itself; " in errors
    assert "a pause of the machine, or a step of its clock, of a second, under load, can do that" in errors
    assert "model instance" not in errors
    assert not regions_of(process.pid)


def test_a_killed_server_is_told_with_what_kills(cut_repository, start_command):
    process, server = start_command(cut_repository)
    os.kill(server, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended by SIGKILL; SIGKILL is what the kernel sends where memory has run out; start" in errors


@pytest.fixture
def crash_that_hangs(tmp_path, monkeypatch) -> Path:
    """A file that makes the server say that it crashed, and hang.

    This happens where the heap is damaged: the handler of the signal waits for the lock of malloc.
    """
    crash = tmp_path / "crash"

    def wrap(scratch):
        found = find_installation(scratch)
        script = scratch / "hangs"
        script.write_text(
            f'#!/bin/sh\n"{found.binary}" "$@" &\nuntil test -e "{crash}"; do sleep 0.1; done\n'
            'echo "Signal (6) received."\nsleep 60\n'
        )
        script.chmod(0o755)
        return replace(found, binary=script)

    monkeypatch.setattr("carnelian_serving.launcher.find_installation", wrap)
    monkeypatch.setattr("carnelian_serving.triton_process.TOLD_END_S", 0.1)
    return crash


def test_a_server_that_hangs_in_its_crash_is_ended(cut_repository, crash_that_hangs, make_server):
    with make_server(cut_repository) as server:
        crash_that_hangs.touch()
        assert server.wait() == -signal.SIGABRT


def test_a_server_that_hangs_in_a_crash_while_it_loads_is_ended(cut_repository, crash_that_hangs, make_server):
    crash_that_hangs.touch()
    server = make_server(cut_repository)
    with pytest.raises(ServerError, match="tritonserver was ended by SIGABRT before it was ready"):
        server.start()


def test_a_signal_amid_waiting_does_not_keep_a_server_from_ending(cut_repository, make_server):
    """An exception out of a signal's handler may come between `Popen.wait` taking its lock and what gives it back."""
    server = make_server(cut_repository)
    server.start()
    pid = server.pid
    process = server._triton._process
    process._waitpid_lock.acquire()
    server.stop()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("num_interruptions", [1, 2])
def test_a_stop_that_is_interrupted_goes_on(
    cut_repository, monkeypatch, num_interruptions, group_pids, regions_of, make_server
):
    """The first one ends the patience with the server; what a second one leaves is the next call's."""
    others = regions_of(os.getpid())  # of servers that other tests share
    interruptions = [KeyboardInterrupt] * num_interruptions

    def wait(process, timeout_s):
        if interruptions:
            raise interruptions.pop()
        return has_ended(process, timeout_s)

    server = make_server(cut_repository)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)  # as one that hangs
    monkeypatch.setattr("carnelian_serving.triton_process.has_ended", wait)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    if num_interruptions > 1:
        server.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert not group_pids(pid)
    assert regions_of(os.getpid()) <= others


def test_a_server_does_not_outlive_a_killed_launcher(cut_repository, start_command, group_pids, wait_until):
    process, server = start_command(cut_repository)
    process.kill()
    process.communicate()
    wait_until(lambda: not group_pids(server))


def test_a_start_runs_no_handlers_of_forks(cut_repository, make_server):
    # gRPC's make one start in a hundred crash, where a client is open.
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    with make_server(cut_repository):
        assert not forks
