import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import typer
from carnelian_serving.addresses import held_ports
from carnelian_serving.cli import STOP_SIGNALS, serve
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server
from carnelian_serving.shared_memory import SHARED_MEMORY


def test_a_server_leaves_no_process_no_shared_memory_and_no_file(
    cut_repository, tmp_path, monkeypatch, connect, group_pids, regions_of, make_server
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = set(SHARED_MEMORY.iterdir())  # of servers that other tests share
    with make_server(cut_repository) as server:
        group = server.pid
        signals = np.ones((1, 4), np.float32)
        answer = connect(server.grpc_url).infer("cut", SIGNAL=signals, LENGTH=np.full((1, 1), 2, np.int32))
        assert answer["CUT"].shape == (1, 2)
        assert any("triton_python" in name for name in group_pids(group).values())
        assert regions_of(os.getpid()) - others
        assert list(tmp_path.glob("carnelian_*"))
    assert not group_pids(group)
    assert not regions_of(os.getpid()) - others
    assert not list(tmp_path.glob("carnelian_*"))
    written = {path.name for path in (cut_repository / "cut" / "1").iterdir()}
    assert written == {"dali.py"}  # no __pycache__ in a repository


def said_of_a_good_run(repository: Path) -> str:
    """What stderr gets: at the default log level Triton itself says nothing."""
    return f"carnelian-serve: starting tritonserver on {repository}\ncarnelian-serve: stopping\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])  # SIGTERM ends most that follow
def test_the_command_ends_on_a_signal_with_status_0(cut_repository, number, start_command, group_pids, regions_of):
    process, server = start_command(cut_repository, "--threads=1")
    assert group_pids(server)
    assert b"CARNELIAN_THREADS=1" in Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    process.send_signal(number)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 0
    assert errors == said_of_a_good_run(cut_repository)
    assert not group_pids(server)
    assert not regions_of(process.pid)


def test_the_memory_of_a_killed_server_is_taken_back_by_the_next(
    cut_repository, tmp_path, monkeypatch, start_command, group_pids, regions_of, wait_until
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pipeline = cut_repository / "cut" / "1" / "dali.py"  # DALI writes a file for a pipeline with conditionals
    source = pipeline.read_text()
    assert "(batch_size=1," in source
    pipeline.write_text(source.replace("(batch_size=1,", "(batch_size=1, enable_conditionals=True,"))
    living, _ = start_command(cut_repository, "--threads=1")
    killed, server = start_command(cut_repository, "--threads=1")
    os.killpg(server, signal.SIGSTOP)  # or it may end by itself
    killed.kill()
    killed.communicate()
    assert len(regions_of(killed.pid)) > 1
    assert len(list(tmp_path.glob(f"carnelian_{killed.pid}_*"))) == 1
    os.killpg(server, signal.SIGKILL)
    wait_until(lambda: not group_pids(server))
    before = regions_of(living.pid)
    after, _ = start_command(cut_repository, "--threads=1")
    assert not regions_of(killed.pid)
    assert not list(tmp_path.glob(f"carnelian_{killed.pid}_*"))
    assert regions_of(living.pid) == before
    for process in (living, after):
        process.terminate()
        process.communicate(timeout=40)
        assert not regions_of(process.pid)
    assert {path.name for path in tmp_path.iterdir()} <= {cut_repository.name}


def test_no_other_user_may_open_a_servers_memory(cut_repository, tmp_path, start_command, regions_of, wait_until):
    def is_open_or_gone(region):
        with contextlib.suppress(FileNotFoundError):  # of a stub that read a configuration
            return bool(region.stat().st_mode & 0o077)
        return True

    process, _ = start_command(cut_repository, "--", "--model-control-mode=poll", "--repository-poll-secs=1")
    try:
        opened = regions_of(process.pid)
        assert len(opened) > 1
        assert {region.stat().st_mode & 0o777 for region in opened} == {0o600}
        later = Path(shutil.copytree(cut_repository / "cut", tmp_path / "later"))
        config = later / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "cut"', 'name: "later"'))
        later.rename(cut_repository / "later")
        wait_until(lambda: (added := regions_of(process.pid) - opened) and not any(map(is_open_or_gone, added)), 120)
    finally:
        process.terminate()
        process.communicate(timeout=40)


def test_options_of_tritonserver_are_passed_on(cut_repository, connect, make_server):
    # A Secret made of a file often ends its line, which no header can.
    options = ["--http-restricted-api=model-repository:a-header=secret\n", "--metrics-config=summary_latencies=true"]
    with make_server(cut_repository, exit_timeout_s=7, triton_options=options) as server:
        assert "--exit-timeout-secs=7" in Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
        index = urllib.request.Request(f"http://{server.http_url}/v2/repository/index", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(index, timeout=60)
        refused.value.close()
        index.add_header("a-header", "secret")
        with urllib.request.urlopen(index, timeout=60) as answer:
            assert answer.status == 200
        connect(server.grpc_url).infer("cut", SIGNAL=np.ones((1, 4), np.float32), LENGTH=np.full((1, 1), 2, np.int32))
        with urllib.request.urlopen(server.metrics_url, timeout=60) as answer:
            assert "nv_inference_request_summary_us" in answer.read().decode()


def test_the_commands_own_options_reach_the_server(cut_repository, start_command):
    process, server = start_command(cut_repository, "--threads=3", "--exit-timeout=7", "--log-level=error")
    words, variables = (Path(f"/proc/{server}/{file}").read_text().split("\0") for file in ("cmdline", "environ"))
    assert {"--exit-timeout-secs=7", "--log-info=false", "--log-warning=false"} <= set(words)
    assert "CARNELIAN_THREADS=3" in variables
    process.terminate()
    process.communicate(timeout=40)


def test_a_port_that_is_not_opened_is_not_printed(cut_repository, command_line):
    command = [*command_line, f"--repository={cut_repository}", "--", "--allow-grpc=0", "--allow-metrics=OFF"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed = process.stdout.readline()
        process.terminate()
    assert re.fullmatch(r"carnelian-serve: ready; HTTP 127\.0\.0\.1:\d+\n", printed)


def test_paths_that_a_shell_reads_otherwise_are_served(cut_repository, tmp_path, monkeypatch, make_server):
    name = "my models, jo'sé (1) a$HOME;b"
    shutil.copytree(cut_repository, tmp_path / name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))  # what TMPDIR says
    with make_server(tmp_path / name) as server:
        assert server.pid


def test_scratch_may_lie_in_shared_memory(cut_repository, monkeypatch, regions_of, make_server):
    monkeypatch.setattr(tempfile, "tempdir", str(SHARED_MEMORY))
    others = regions_of(os.getpid())
    with make_server(cut_repository):
        pass
    assert regions_of(os.getpid()) <= others


def test_a_command_under_nohup_outlives_its_terminal(cut_repository, start_command, group_pids):
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
    assert not group_pids(server)


def test_a_full_standard_output_stops_nothing(cut_repository, command_line):
    with held_ports("127.0.0.1", {"--http-port": 0}) as ports, Path("/dev/full").open("w") as full:
        port = ports["--http-port"]
        arguments = [*command_line, f"--repository={cut_repository}", f"--http-port={port}"]
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


def test_a_signal_does_not_interrupt_the_clean_up_after_a_crash(cut_repository, monkeypatch, capfd, regions_of):
    others = regions_of(os.getpid())  # of servers that other tests share
    stop = Server.stop

    def stop_meanwhile_signalled(server):
        os.kill(os.getpid(), signal.SIGTERM)
        stop(server)

    def kill(server):
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
    assert "was ended by SIGKILL" in capfd.readouterr().err
    assert regions_of(os.getpid()) <= others


def test_a_second_start_is_refused_and_leaves_the_server_alone(cut_repository, make_server):
    with make_server(cut_repository) as server:
        pid = server.pid
        with pytest.raises(ServerError, match="must be stopped before it is started again"):
            server.start()
        assert server.pid == pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_stop_amid_the_start_is_told_as_what_it_is(cut_repository, monkeypatch, make_server):
    """As a signal's handler or another thread stops it."""
    server = make_server(cut_repository)
    monkeypatch.setattr(server, "_is_ready", lambda: server.stop() is not None)
    with pytest.raises(ServerError, match=r"tritonserver was ended by SIG(TERM|KILL) before it was ready"):
        server.start()


def test_a_port_of_the_metrics_that_is_taken_ends_the_start(cut_repository, make_server):
    """Models were ready by then, and so was the server said to be."""
    with socket.create_server(("127.0.0.5", 0)) as taken:
        options, port = ["--metrics-address=0.0.0.0"], taken.getsockname()[1]
        server = make_server(cut_repository, metrics_port=port, triton_options=options)
        with pytest.raises(ServerError, match=r"before it was ready:\n  failed to start Metrics service.*in use"):
            server.start()
