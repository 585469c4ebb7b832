"""When `carnelian-transcribe` stops before its last file, and what it says then."""

import errno
import signal
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
import soundfile
from carnelian_client._files_cli import Clip
from carnelian_client._output_cli import OutputError
from carnelian_client._run_cli import Run

COMMAND = [sys.executable, "-m", "carnelian_client"]
GO_ON = "; the same command with --existing skip goes on"


@pytest.fixture
def clips(tmp_path, wav):
    """Fifty files that the server can tell by their lengths."""
    files = [tmp_path / f"{i:02}.wav" for i in range(50)]
    for i, file in enumerate(files):
        file.write_bytes(wav + bytes(2 * i))
    return files


@pytest.fixture
def number_of(wav):
    """The number of a request's clip."""
    return lambda request: (len(request.raw_input_contents[0]) - len(wav)) // 2


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("NOT_FOUND", "Request for unknown model: 'quartznet_demo' is not found"),
        ("UNAUTHENTICATED", "a key"),
        ("INVALID_ARGUMENT", "in ensemble 'm', wrong option: no such option"),
    ],
    ids=["model", "key", "option"],
)
@pytest.mark.parametrize("kind", [(), ("--long",)], ids=["clips", "long"])
def test_a_failure_that_all_files_share_is_told_once(
    transcribe, endpoint, triton, clips, tmp_path, status, words, kind
):
    triton.script = [(status, words)] * 50
    arguments = (*clips, "--url", endpoint.url, "--concurrency", "1", *kind)
    code, out, err = transcribe(*arguments)
    failure, stopped = err.splitlines()
    assert (code, out) == (1, "")
    assert failure.startswith(f"carnelian-transcribe: {clips[0]}")
    assert stopped == "carnelian-transcribe: stopped: the other files would fail too; 49 files were not tried"
    assert len(triton.requests) <= 3
    triton.script = [(status, words)] * 50
    for existing, go_on in (("refuse", GO_ON), ("skip", GO_ON), ("replace", "")):
        _, _, err = transcribe(*arguments, "--out", tmp_path / "out", "--existing", existing)
        assert err.splitlines()[-1] == stopped + go_on


def test_of_a_long_file_as_many_pieces_are_sent_at_a_time_as_asked_for(
    transcribe, endpoint, triton, make_result, tmp_path
):
    all_there = threading.Barrier(10, timeout=30)

    def meet(request, context):
        all_there.wait()
        return make_result("met")

    triton.answer = meet
    silence = tmp_path / "silence.wav"
    soundfile.write(silence, np.zeros(46 * 8000), 8000)
    words = ("--long", "--longest-piece", "5", "--concurrency", "10")
    assert transcribe(silence, *words, "--url", endpoint.url) == (0, f"{' '.join(['met'] * 10)}\n", "")


def test_an_outage_stops_the_run_and_the_same_command_goes_on(
    transcribe, endpoint, triton, make_result, clips, tmp_path, number_of
):
    is_out = True

    def answer(request, context):
        if is_out and number_of(request) >= 10:
            context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect")
        return make_result(str(number_of(request)))

    triton.answer = answer
    out = tmp_path / "out"
    words = (*clips, "--url", endpoint.url, "--attempts", "1", "--concurrency", "4", "--out", out)
    status, _, err = transcribe(*words)
    lines = err.splitlines()
    assert status == 1
    assert [line.split(": ")[1] for line in lines] == [*map(str, clips[10:15]), "stopped"]
    assert lines[-1] == f"carnelian-transcribe: stopped: 5 files in a row got no answer; 35 files were not tried{GO_ON}"
    assert len(triton.requests) <= 23  # with those that were in flight
    assert sorted(path.name for path in out.iterdir()) == [f"{i:02}.txt" for i in range(10)]
    is_out = False
    done = transcribe(*words, "--existing", "skip")
    assert done == (0, "", "carnelian-transcribe: 10 of 50 files were transcribed already\n")
    assert [(out / f"{i:02}.txt").read_text() for i in range(50)] == [f"{i}\n" for i in range(50)]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_one_broken_connection_costs_does_not_stop_the_run(transcribe, endpoint, triton, clips, concurrency):
    triton.script = [("UNAVAILABLE", "socket closed")] * concurrency
    status, out, err = transcribe(*clips, "--url", endpoint.url, "--attempts", "1", "--concurrency", concurrency)
    assert status == 1
    assert (len(out.splitlines()), len(err.splitlines())) == (50 - concurrency, concurrency)


def test_a_transcript_between_shows_that_the_server_is_there_and_a_missing_file_does_not(
    transcribe, endpoint, triton, answers, clips, tmp_path
):
    away, there = ("UNAVAILABLE", "socket closed"), answers("a")
    triton.script = [away, there, away, away]
    files = [*clips[:3], tmp_path / "missing.wav", *clips[3:]]
    status, out, err = transcribe(*files, "--url", endpoint.url, "--attempts", "1", "--concurrency", "1")
    assert status == 1
    assert out.startswith(f"{clips[1]}\ta\n")
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        *(str(clips[0]), str(clips[2]), f"{tmp_path}/missing.wav", str(clips[3]), "stopped")
    ]
    assert "stopped: 2 files in a row got no answer" in err


def test_an_answer_that_is_no_transcript_shows_it_too(transcribe, endpoint, triton, clips):
    triton.script = [("UNAVAILABLE", "socket closed"), ("INVALID_ARGUMENT", "the clip is bad")] * 3
    status, out, err = transcribe(*clips, "--url", endpoint.url, "--attempts", "1", "--concurrency", "1")
    assert (status, len(out.splitlines()), len(err.splitlines())) == (1, 44, 6)


def test_of_long_recordings_one_is_in_flight_at_a_time(transcribe, endpoint, triton, clips):
    triton.script = [("UNAVAILABLE", "socket closed")] * 50
    _, _, err = transcribe(*clips, "--url", endpoint.url, "--attempts", "1", "--long")
    assert "stopped: 2 files in a row got no answer; 48 files" in err


def test_messages_without_room_do_not_end_the_run(endpoint, clips, tmp_path):
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        command = [*COMMAND, tmp_path / "missing.wav", *clips, "--url", endpoint.url]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 50)


def test_what_was_in_flight_at_a_stop_is_still_delivered(
    transcribe, endpoint, triton, make_result, clips, tmp_path, number_of
):
    is_in_flight = threading.Event()

    def answer(request, context):
        if number_of(request) == 0:
            is_in_flight.wait()
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key")
        is_in_flight.set()
        return make_result("a")

    triton.answer = answer
    _, _, err = transcribe(*clips, "--url", endpoint.url, "--concurrency", "2", "--out", tmp_path / "out")
    done = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert done[0] == "01.txt"
    assert err.splitlines()[1:] == [
        f"carnelian-transcribe: stopped: the other files would fail too; {49 - len(done)} files were not tried{GO_ON}"
    ]
    assert len(done) <= 4


def test_a_full_disk_stops_the_run(transcribe, endpoint, clips, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "00.txt").symlink_to("/dev/full")
    words = ("--url", endpoint.url, "--concurrency", "1", "--out", out, "--existing", "replace")
    status, _, err = transcribe(*clips, *words)
    failure, stopped = err.splitlines()
    assert status == 1
    assert failure == f"carnelian-transcribe: {clips[0]}: {out}/00.txt cannot be written: No space left on device"
    assert stopped.startswith("carnelian-transcribe: stopped: the other files would fail too; 4")
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        command = [*COMMAND, *clips, "--url", endpoint.url]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"carnelian-transcribe: {clips[0]}: the standard output cannot be written: No space left on device",
        "carnelian-transcribe: stopped: the other files would fail too; 49 files were not tried",
    ]


@pytest.mark.parametrize(
    ("number", "is_stopped"),
    [(errno.EDQUOT, True), (errno.EROFS, True), (errno.EIO, True), (errno.EISDIR, False), (errno.ENAMETOOLONG, False)],
    ids=["EDQUOT", "EROFS", "EIO", "EISDIR", "ENAMETOOLONG"],
)
def test_a_run_stops_where_nothing_can_be_written_and_not_at_a_files_own_failure(client, clip, number, is_stopped):
    def fail(transcript, clip):
        raise OutputError(number, "it cannot be written")

    run = Run([Clip(str(clip), {})] * 3, concurrency=1)
    failures = run.take((client.transcribe(file) for file in run.files()), fail)
    assert list(failures) == [f"{clip}: it cannot be written"] * (1 if is_stopped else 3)
    assert bool(run.why_stopped) == is_stopped


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("kind", [(), ("--long",)], ids=["clips", "long"])
def test_ctrl_c_says_how_far_the_run_got(endpoint, triton, answers, late, clips, tmp_path, kind):
    triton.script = [answers("a")] * 3
    triton.answer = late
    missing, out = tmp_path / "missing.wav", tmp_path / "out"
    files = [*clips[:3], missing, *clips[3:]]
    words = [*COMMAND, *files, "--url", endpoint.url, "--concurrency", "1", "--out", out, *kind]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
        try:
            assert command.stderr.readline() == f"carnelian-transcribe: {missing}: No such file or directory\n"
            command.send_signal(signal.SIGINT)
            assert command.wait(timeout=60) == 130
            interrupted = f"carnelian-transcribe: interrupted: 3 done, 1 failed, 47 not tried{GO_ON}\n"
            assert command.stderr.read() == interrupted
            assert sorted(path.name for path in out.iterdir()) == ["00.txt", "01.txt", "02.txt"]
        finally:
            command.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows holds no signal back")
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_the_client_is_loaded_ends_with_130(clip):
    """gRPC's modules of C import NumPy, and made an ImportError of it."""
    script = """
import os, signal, sys
from carnelian_client import _cli

def interrupt(event, arguments):
    if event == "import" and arguments[0] == "numpy.version":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
_cli.app()
"""
    done = subprocess.run([sys.executable, "-c", script, clip], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert "ImportError" not in done.stderr
