import contextlib
import fcntl
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from carnelian_serving.addresses import choose_ports
from carnelian_serving.cli import STOP_SIGNALS, serve
from carnelian_serving.endings import has_ended
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import (
    Installation,
    find_installation,
)
from carnelian_serving.launcher import Server
from carnelian_serving.limits import OPEN_FILES, raised_limits
from carnelian_serving.shared_memory import SHARED_MEMORY

COMMAND = str(Path(sys.executable).with_name("carnelian-serve"))
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def group_pids(group: int) -> dict[int, str]:
    """Returns the living processes of a process group, pid -> command."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = status.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        state, _, group_of_process = fields.split()[:3]
        if int(group_of_process) == group and state != "Z":
            found[int(status.parent.name)] = name
    return found


def group_members(group: int) -> list[str]:
    """Returns the commands of the processes in a process group."""
    return list(group_pids(group).values())


def regions(launcher_pid: int) -> set[Path]:
    """Returns the shared memory regions of a launcher's servers."""
    return set(SHARED_MEMORY.glob(f"carnelian_{launcher_pid}_*"))


def test_a_server_leaves_no_process_no_shared_memory_and_no_file(
    cut_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], Any]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = set(SHARED_MEMORY.iterdir())  # of servers that other tests share
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        group = server.pid
        signals = np.ones((1, 4), np.float32)
        answer = connect(server.grpc_url).infer("cut", SIGNAL=signals, LENGTH=np.full((1, 1), 2, np.int32))
        assert answer["CUT"].shape == (1, 2)
        assert any("triton_python" in name for name in group_members(group))
        assert regions(os.getpid()) - others
        assert list(tmp_path.glob("carnelian_*"))
    assert group_members(group) == []
    assert not regions(os.getpid()) - others
    assert not list(tmp_path.glob("carnelian_*"))
    written = {path.name for path in (cut_repository / "cut" / "1").iterdir()}
    assert written == {"dali.py"}  # no __pycache__ in a repository


def start_command(repository: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    """A `carnelian-serve` that is ready, and the process of its tritonserver."""
    command = [COMMAND, f"--repository={repository}", *FREE_PORTS, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("carnelian-serve: ready; gRPC 127.0.0.1:")
    (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, int(server)


def said_of_a_good_run(repository: Path) -> str:
    """What stderr gets: at the default log level Triton itself says nothing."""
    return f"carnelian-serve: starting tritonserver on {repository}\ncarnelian-serve: stopping\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_command_ends_on_a_signal_with_status_0(cut_repository: Path, number: signal.Signals) -> None:
    process, server = start_command(cut_repository, "--threads=1")
    assert group_members(server)
    assert b"CARNELIAN_THREADS=1" in Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    process.send_signal(number)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 0
    assert errors == said_of_a_good_run(cut_repository)
    assert group_members(server) == []
    assert not regions(process.pid)


def test_the_memory_of_a_killed_server_is_taken_back_by_the_next(
    cut_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pipeline = cut_repository / "cut" / "1" / "dali.py"  # DALI writes a file for a pipeline with conditionals
    source = pipeline.read_text()
    assert "(batch_size=1," in source
    pipeline.write_text(source.replace("(batch_size=1,", "(batch_size=1, enable_conditionals=True,"))
    living, _ = start_command(cut_repository, "--threads=1")
    killed, server = start_command(cut_repository, "--threads=1")
    killed.kill()
    killed.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    while group_members(server):
        time.sleep(0.05)
    assert len(regions(killed.pid)) > 1
    assert len(list(tmp_path.glob(f"carnelian_{killed.pid}_*"))) == 1
    before = regions(living.pid)
    after, _ = start_command(cut_repository, "--threads=1")
    assert not regions(killed.pid)
    assert not list(tmp_path.glob(f"carnelian_{killed.pid}_*"))
    assert regions(living.pid) == before
    for process in (living, after):
        process.terminate()
        process.communicate(timeout=40)
        assert not regions(process.pid)
    assert {path.name for path in tmp_path.iterdir()} <= {cut_repository.name}


def test_no_other_user_may_open_a_servers_memory(cut_repository: Path, tmp_path: Path) -> None:
    process, _ = start_command(cut_repository, "--", "--model-control-mode=poll", "--repository-poll-secs=1")
    try:
        opened = regions(process.pid)
        assert len(opened) > 1
        assert {region.stat().st_mode & 0o777 for region in opened} == {0o600}
        later = Path(shutil.copytree(cut_repository / "cut", tmp_path / "later"))
        config = later / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "cut"', 'name: "later"'))
        later.rename(cut_repository / "later")
        deadline = time.monotonic() + 30
        while not (added := regions(process.pid) - opened) or any(region.stat().st_mode & 0o077 for region in added):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.terminate()
        process.communicate(timeout=40)


def test_options_of_tritonserver_are_passed_on(cut_repository: Path, connect: Callable[[str], Any]) -> None:
    # A Secret made of a file often ends its line, which no header can.
    options = ["--http-restricted-api=model-repository:a-header=secret\n", "--metrics-config=summary_latencies=true"]
    with Server(
        cut_repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=7, triton_options=options
    ) as server:
        assert "--exit-timeout-secs=7" in Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        index = urllib.request.Request(f"http://{server.http_url}/v2/repository/index", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(index, timeout=5)
        refused.value.close()
        index.add_header("a-header", "secret")
        with urllib.request.urlopen(index, timeout=5) as answer:
            assert answer.status == 200
        connect(server.grpc_url).infer("cut", SIGNAL=np.ones((1, 4), np.float32), LENGTH=np.full((1, 1), 2, np.int32))
        with urllib.request.urlopen(server.metrics_url, timeout=5) as answer:
            assert "nv_inference_request_summary_us" in answer.read().decode()


def test_a_port_that_is_not_opened_is_not_printed(cut_repository: Path) -> None:
    command = [COMMAND, f"--repository={cut_repository}", *FREE_PORTS, "--", "--allow-grpc=0", "--allow-metrics=OFF"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline()
        process.terminate()
    assert re.fullmatch(r"carnelian-serve: ready; HTTP 127\.0\.0\.1:\d+\n", printed)


@pytest.mark.parametrize("name", ["my models", "jo'sé (1)", "a$HOME;b"])
def test_paths_that_a_shell_reads_otherwise_are_served(
    cut_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(cut_repository, tmp_path / name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))  # what TMPDIR says
    with Server(tmp_path / name, http_port=0, grpc_port=0, metrics_port=0) as server:
        assert server.pid


def test_scratch_may_lie_in_shared_memory(cut_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(SHARED_MEMORY))
    others = regions(os.getpid())
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0):
        pass
    assert regions(os.getpid()) <= others


def test_a_server_reports_to_nobody_and_may_open_many_files(cut_repository: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
            process = Path(f"/proc/{server.pid}")
            environment = (process / "environ").read_bytes().split(b"\0")
            assert {b"ORT_DISABLE_TELEMETRY=1", b"OPENBLAS_NUM_THREADS=1"} <= set(environment)
            (line,) = (line for line in (process / "limits").read_text().splitlines() if "open files" in line)
            assert int(line.split()[3]) == min(OPEN_FILES, limits[1])
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_command_under_nohup_outlives_its_terminal(cut_repository: Path) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process, server = start_command(cut_repository)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 0
    assert group_members(server) == []


def test_a_full_standard_output_stops_nothing(cut_repository: Path) -> None:
    port = choose_ports("127.0.0.1", {"--http-port": 0})["--http-port"]
    arguments = [COMMAND, f"--repository={cut_repository}", *FREE_PORTS, f"--http-port={port}"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").read()
            break
        time.sleep(0.1)
    time.sleep(0.5)  # for the line that finds no room
    process.terminate()
    assert process.communicate(timeout=40)[1] == said_of_a_good_run(cut_repository)
    assert process.returncode == 0


def test_a_crashed_instance_ends_the_command_with_its_name(cut_repository: Path) -> None:
    process, server = start_command(cut_repository)
    [stub] = [pid for pid in group_pids(server) if pid != server]
    os.kill(stub, signal.SIGSEGV)
    _, errors = process.communicate(timeout=15)  # far below the half minute that Triton would wait for it
    assert process.returncode == 1
    assert "the process of cut_0_0 (SIGSEGV) has crashed" in errors
    assert group_members(server) == []


def test_an_instance_that_stands_still_ends_the_server_with_its_name(
    cut_repository: Path, monkeypatch: pytest.MonkeyPatch, connect: Callable[[str], Any]
) -> None:
    monkeypatch.setattr("carnelian_serving.triton_process.STOPPED_CHECKS", 2)
    request = {"SIGNAL": np.ones((1, 4), np.float32), "LENGTH": np.full((1, 1), 2, np.int32)}
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        group = server.pid
        [stub] = [pid for pid in group_pids(group) if pid != group]
        os.kill(stub, signal.SIGSTOP)
        [answer] = connect(server.grpc_url).infer_together("cut", [request])
        assert "Stub process 'cut_0_0' is not healthy" in str(answer)
        with pytest.raises(ServerError, match="the process of cut_0_0 stands still, as SIGSTOP or a debugger stops it"):
            server.wait()
        noticed = time.monotonic()
    assert time.monotonic() < noticed + 15  # Triton waits for half a minute, once a request has found it so
    assert group_members(group) == []


def test_a_stop_does_not_wait_for_whoever_reads_no_log(cut_repository: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    unread = os.open(tmp_path / "log", os.O_RDWR)
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    command = [COMMAND, f"--repository={cut_repository}", *FREE_PORTS, "--log-level=verbose"]
    with (tmp_path / "log").open("w") as log:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=buffered)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"carnelian-serve: ready")
    process.terminate()
    process.communicate(timeout=40)
    os.close(unread)
    assert process.returncode == 0
    assert not regions(process.pid)


def test_a_crashed_server_is_told_by_its_signal(cut_repository: Path) -> None:
    process, server = start_command(cut_repository)
    os.kill(server, signal.SIGABRT)  # whose handler writes a stack, with the help of child processes
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "tritonserver must run until it is told to end, but was ended by SIGABRT by itself; " in errors
    assert "a pause of the machine of a second, under load, can do that" in errors
    assert "model instance" not in errors
    assert not regions(process.pid)


def test_a_killed_server_is_told_with_what_kills(cut_repository: Path) -> None:
    process, server = start_command(cut_repository)
    os.kill(server, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended by SIGKILL; SIGKILL is what the kernel sends where memory has run out; start" in errors


def test_a_server_that_hangs_in_its_crash_is_ended(
    cut_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the heap is damaged: the handler of the signal waits for the lock of malloc."""
    crash = tmp_path / "crash"

    def wrap(scratch: Path) -> Installation:
        found = find_installation(scratch)
        script = scratch / "hangs"
        script.write_text(
            f'#!/bin/sh\n"{found.binary}" "$@" &\nuntil test -e "{crash}"; do sleep 0.1; done\n'
            'echo "Signal (6) received."\nsleep 60\n'
        )
        script.chmod(0o755)
        return replace(found, binary=script)

    monkeypatch.setattr("carnelian_serving.launcher.find_installation", wrap)
    monkeypatch.setattr("carnelian_serving.triton_process.CRASH_END_S", 0.1)
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        crash.touch()
        assert server.wait() == -signal.SIGABRT


def test_a_signal_does_not_interrupt_the_clean_up_after_a_crash(
    cut_repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = regions(os.getpid())  # of servers that other tests share
    stop = Server.stop

    def stop_meanwhile_signalled(server: Server) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stop(server)

    def kill(server: Server) -> int:
        os.kill(server.pid, signal.SIGKILL)
        return wait(server)

    wait = Server.wait
    monkeypatch.setattr(Server, "wait", kill)
    monkeypatch.setattr(Server, "stop", stop_meanwhile_signalled)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with pytest.raises(typer.Exit):
            serve(repository=cut_repository, http_port=0, grpc_port=0, metrics_port=0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "was ended by SIGKILL" in capsys.readouterr().err
    assert regions(os.getpid()) <= others


def test_a_large_body_that_curl_calls_a_form_does_not_end_the_server(cut_repository: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=30)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/v2/models/cut/infer", bytes(24_000_000), form)
        answer = connection.getresponse()
        assert (answer.status, "error" in json.loads(answer.read())) == (500, True)
        connection.close()
    assert resource.getrlimit(resource.RLIMIT_STACK) == limits


def test_stacks_are_left_as_they_are_where_address_space_is_limited() -> None:
    stack, space = resource.getrlimit(resource.RLIMIT_STACK), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**46, space[1]))
    try:
        with raised_limits():
            assert resource.getrlimit(resource.RLIMIT_STACK) == stack
    finally:
        resource.setrlimit(resource.RLIMIT_AS, space)


def test_a_signal_amid_waiting_does_not_keep_a_server_from_ending(cut_repository: Path) -> None:
    """An exception out of a signal's handler may come between `Popen.wait` taking its lock and what gives it back."""
    server = Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0)
    server.start()
    pid = server.pid
    process = server._triton._process
    assert process is not None
    process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    server.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_a_second_start_is_refused_and_leaves_the_server_alone(cut_repository: Path) -> None:
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        pid = server.pid
        with pytest.raises(ServerError, match="must be stopped before it is started again"):
            server.start()
        assert server.pid == pid
    assert not Path(f"/proc/{pid}").exists()
    with server:
        assert server.pid != pid


def test_a_stop_amid_the_start_is_told_as_what_it_is(cut_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal's handler or another thread stops it."""
    server = Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0)
    monkeypatch.setattr(server, "_is_ready", lambda: server.stop() is not None)
    with pytest.raises(ServerError, match=r"tritonserver was ended by SIG(TERM|KILL) before it was ready"):
        server.start()


@pytest.mark.parametrize("num_interruptions", [1, 2])
def test_a_stop_that_is_interrupted_goes_on(
    cut_repository: Path, monkeypatch: pytest.MonkeyPatch, num_interruptions: int
) -> None:
    """The first one ends the patience with the server; what a second one leaves is the next call's."""
    others = regions(os.getpid())  # of servers that other tests share
    interruptions = [KeyboardInterrupt] * num_interruptions

    def wait(process: subprocess.Popen[str], timeout_s: float) -> bool:
        if interruptions:
            raise interruptions.pop()
        return has_ended(process, timeout_s)

    server = Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)  # as one that hangs
    monkeypatch.setattr("carnelian_serving.triton_process.has_ended", wait)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    if num_interruptions > 1:
        server.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert group_members(pid) == []
    assert regions(os.getpid()) <= others


def test_a_port_of_the_metrics_that_is_taken_ends_the_start(cut_repository: Path) -> None:
    """Models were ready by then, and so was the server said to be."""
    with socket.create_server(("127.0.0.5", 0)) as taken:
        server = Server(
            cut_repository,
            http_port=0,
            grpc_port=0,
            metrics_port=taken.getsockname()[1],
            triton_options=["--metrics-address=0.0.0.0"],
        )
        with pytest.raises(ServerError, match=r"before it was ready:\n  failed to start Metrics service.*in use"):
            server.start()


def test_a_server_does_not_outlive_a_killed_launcher(cut_repository: Path) -> None:
    process, server = start_command(cut_repository)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while group_members(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_members(server) == []


def test_a_start_runs_no_handlers_of_forks(cut_repository: Path) -> None:
    # gRPC's make one start in a hundred crash, where a client is open.
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0):
        assert not forks


def test_metrics_are_served(tiny_server: Server, client: Any) -> None:
    client.infer("ragged", FEATURES=np.ones((1, 4, 3), np.float32))
    with urllib.request.urlopen(tiny_server.metrics_url, timeout=5) as answer:
        text = answer.read().decode()
    assert 'nv_inference_request_success{model="ragged",version="1"}' in text
