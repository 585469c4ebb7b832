"""What the launcher does with tritonserver's log, and what is in it."""

import errno
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from carnelian_serving.errors import ServerError
from carnelian_serving.server_log import MOST_WAITING, ServerLog
from carnelian_serving.shared_memory import SHARED_MEMORY
from carnelian_serving.startup_log import is_noise
from tritonclient.utils import InferenceServerException

PIPE_BYTES = 2**16


def test_a_clip_that_a_stage_refuses_is_found_by_its_request_id(make_server, connect, wait_until):
    repository = Path(__file__).parents[2] / "model_repository"
    models = ["audio_decode", "quartznet_demo_ctc"]
    scores, length = np.zeros((1, 1, 29), np.float32), np.zeros((1, 1), np.int32)
    hot = {"decoder": "beam", "hotwords": '["Ünsal"]'}
    with make_server(repository, models=models, log_level="info") as server:
        for model, request_id, parameters, inputs in (
            ("audio_decode", "first", {}, {"AUDIO": np.full((1, 9), 7, np.uint8)}),
            ("quartznet_demo_ctc", "second", {}, {"LOG_PROBS": scores, "LOG_PROB_LENGTH": length}),
            ("quartznet_demo_ctc", "third", hot, {"LOG_PROBS": scores, "LOG_PROB_LENGTH": length + 1}),
        ):
            with pytest.raises(InferenceServerException):
                connect(server.grpc_url).infer(model, request_id=request_id, parameters=parameters, **inputs)
        wait_until(lambda: sum(" refuses: " in line for line in server.log) >= 3)  # Triton writes them by a thread
        refusals = [line.partition("[request id: ")[2] for line in server.log if " refuses: " in line]
        assert [line.partition(":")[0] for line in refusals] == [
            "first] 'audio_decode' refuses",
            "second] 'quartznet_demo_ctc' refuses",
            "third] 'quartznet_demo_ctc' refuses",
        ]
        assert not any("nsal" in line for line in refusals)  # what a caller wrote


@pytest.mark.parametrize("last", [["the last"], []], ids=["more follows", "at the end"])
def test_a_reader_that_stands_still_holds_up_nobody_and_misses_what_is_counted(wait_until, last):
    """The thread that empties tritonserver's pipe waited for it, and so did tritonserver."""
    resumed, taken = threading.Event(), []

    def take(line):
        resumed.wait()
        taken.append(line)

    log = ServerLog(take, with_noise=True)
    num_lines = MOST_WAITING + 500
    program = [sys.executable, "-c", f"for i in range({num_lines}): print(i)"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        log.follow(process.stdout)
        assert process.wait(30) == 0
        wait_until(lambda: log.lines[-1:] == [str(num_lines - 1)])
        resumed.set()
        wait_until(lambda: len(taken) >= MOST_WAITING)
        for line in last:
            log.tell(line)
        log.close()
    *lines, note = taken[: len(taken) - len(last)]
    assert lines == [str(i) for i in range(max(MOST_WAITING, len(lines)))]
    num_left_out = num_lines - len(lines)
    assert note == f"carnelian-serve: {num_left_out} lines of the log are left out here, for nobody took them"
    assert taken[len(lines) + 1 :] == last


def follow(program):
    """Follow the output of a program to its end; return the log, and what was handed on."""
    taken = []
    log = ServerLog(taken.append, with_noise=True)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        log.follow(process.stdout)
        log.close()
    return log, taken


def test_a_reader_that_reads_gets_all():
    log, taken = follow("for i in range(5000): print(i)")
    log.close()  # of a log that is closed, it does nothing
    assert taken == [str(i) for i in range(5000)]


def test_a_line_that_comes_again_and_again_is_kept_once_and_counted():
    """Where open files run out, Triton writes one without end: 47 MB in ten seconds."""
    log, taken = follow("print('first'); print('again\\n' * 100_000 + '\\n\\n\\nlast')")
    assert taken == ["first", "again", "carnelian-serve: this came 100000 times: again", "", "last"]
    assert log.lines == ["first", "again", "", "last"]


@pytest.mark.parametrize("refused", ["_hand_on", "_read"])
def test_a_log_for_which_no_thread_can_be_had_keeps_no_server_from_its_end(
    cut_repository, monkeypatch, refused, make_server
):
    """Where the container's `pids.max` is reached."""
    start = threading.Thread.start

    def refuse(thread):
        if getattr(thread._target, "__name__", "") == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    server = make_server(cut_repository)
    with pytest.raises(
        ServerError, match=r"processes and threads must be able to start, but not here: it ran out of threads"
    ):
        server.start()
    assert not list(SHARED_MEMORY.glob(f"{server._triton.regions.prefix}*"))


def test_a_server_for_which_no_process_can_be_had_is_told_why(cut_repository, monkeypatch, make_server):
    start = subprocess.Popen

    def refuse(*arguments, **options):
        if "pass_fds" in options:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse)
    server = make_server(cut_repository)
    with pytest.raises(ServerError, match=r"must be able to start, but not here: it ran out of threads, processes"):
        server.start()
    assert not list(SHARED_MEMORY.glob(f"{server._triton.regions.prefix}*"))


def test_who_gets_the_log_may_raise(cut_repository, caplog, make_server, wait_until):
    def fail(line):
        raise ValueError("closed")

    with make_server(cut_repository, log_level="verbose", on_log=fail) as server:
        known = len(server.log)
        with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready", timeout=60):
            pass
        wait_until(lambda: len(server.log) > known)
    assert [record.message for record in caplog.records if "`on_log`" in record.message] == [
        "`on_log` must take every line of the log, but raised; it gets no more"
    ]


def test_a_server_whose_stderr_was_closed_from_the_start_goes_on(cut_repository, command_line):
    closed = [
        "/bin/sh",
        "-c",
        'exec "$@" 2>&-',
        "sh",
        *command_line,
        f"--repository={cut_repository}",
        "--log-level=verbose",
    ]
    with subprocess.Popen(closed, stdout=subprocess.PIPE, text=True) as process:
        http = process.stdout.readline().partition("HTTP ")[2].partition(",")[0]
        path = "v2/models/" + "a" * 1000  # which the log repeats
        for _ in range(2 * PIPE_BYTES // 1000):
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"http://{http}/{path}", timeout=60)
        process.terminate()
    assert process.returncode == 0


def test_lines_that_every_start_has_are_told_from_errors_of_requests():
    """The reason for which the native DALI backend failed batches was left out with them."""
    no_driver = "CUDA driver version is insufficient for CUDA runtime version"
    assert is_noise(f'E1128 ensemble_scheduler.cc:1468] "unable to create stream for quartznet_demo: {no_driver}"')
    no_device = "no CUDA-capable device is detected"
    assert is_noise(f'E1128 ensemble_scheduler.cc:1468] "unable to create stream for quartznet_demo: {no_device}"')
    assert not is_noise('E1128 ensemble_scheduler.cc:1468] "unable to create stream for quartznet_demo: out of memory"')
    assert is_noise('E0000 message_lite.cc:200] Can\'t parse message of type "dali_proto.PipelineDef" because it is')
    assert not is_noise(f'E1128 dali_model_instance.cc:24] "CUDA runtime API error (35):\\n{no_driver}"')
