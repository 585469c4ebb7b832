"""`carnelian-transcribe --stream`: what is printed of audio that comes through a pipe, and when."""

import contextlib
import fcntl
import functools
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import soundfile
from carnelian_client import Utterance
from carnelian_client.__main__ import main
from carnelian_client._stream_cli import _blocks, _last_cells

RATE = 16_000
COMMAND = [sys.executable, "-m", "carnelian_client", "--stream"]


@pytest.fixture
def transcribe(call):
    """Runs `carnelian-transcribe --stream` in this process."""
    return functools.partial(call, main, "--stream")


@pytest.fixture
def through_pipe(endpoint):
    """Runs `carnelian-transcribe --stream` on bytes that come through a pipe."""

    def run(data, *words):
        done = subprocess.run([*COMMAND, "-", "--url", endpoint.url, *words], input=data, capture_output=True)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


@pytest.fixture
def start(endpoint, heeds_ctrl_c):
    """Starts `carnelian-transcribe --stream -`, whose input a test writes and closes."""
    running = []

    def start(*words, **streams):
        command = [*COMMAND, "-", "--url", endpoint.url, *words]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, **streams))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def utterances(client, says_how_long, talk):
    """What the SDK hears in `talk`, given as the command reads it."""
    heard = list(client.transcribe_stream((talk[i : i + 1600] for i in range(0, len(talk), 1600)), RATE))
    assert {type(each) for each in heard} == {Utterance}
    return heard


def growing(samples):
    """A WAV file as a recorder writes it into a pipe: with a header that counts far too much."""
    fmt = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + fmt + b"data\xff\xff\xff\xff" + samples.tobytes()


def bytes_in(pipe):
    """How much of what was written to a pipe was not read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def final_lines(utterances):
    return "".join(f"{each.transcript.text}\n" for each in utterances if each.is_final)


def test_text_is_what_is_final(through_pipe, utterances, talk):
    assert through_pipe(growing(talk)) == (0, final_lines(utterances), "")


def test_no_word_turns_the_line_around(through_pipe, triton, make_result, talk):
    triton.answer = lambda request, context: make_result("a\u202eb")
    assert through_pipe(growing(talk)) == (0, "a\\u202eb\n" * 2, "")


def test_json_is_each_result(through_pipe, utterances, talk):
    status, out, err = through_pipe(growing(talk), "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [line["is_final"] for line in lines if line["is_final"]] == [True, True]
    for line in lines:
        assert line["text"] == f"{1000 * (line['end'] - line['start']):.0f}"
        assert line["words"][0]["start"] == pytest.approx(line["start"], abs=0.001)
    finals = [each for each in utterances if each.is_final]
    assert [line["end"] for line in lines if line["is_final"]] == [round(each.end_s, 3) for each in finals]


def test_an_utterance_is_printed_while_the_audio_goes_on(start, utterances, talk):
    first, second = (each for each in utterances if each.is_final)
    process = start(stdout=subprocess.PIPE)
    process.stdin.write(growing(talk[: round(second.start_s * RATE)]))
    process.stdin.flush()
    assert process.stdout.readline().decode() == f"{first.transcript.text}\n"
    assert process.poll() is None


def test_the_first_ctrl_c_ends_the_audio_and_nothing_that_was_read_is_lost(start, triton, utterances, talk, wait_until):
    may_answer, answer = threading.Event(), triton.answer

    def wait_and_answer(request, context):
        may_answer.wait(timeout=60)
        return answer(request, context)

    triton.requests.clear()
    triton.answer = wait_and_answer
    first, second = (each for each in utterances if each.is_final)
    said_s = second.end_s - 1
    process = start(stdout=subprocess.PIPE)
    process.stdin.write(growing(talk[: round(said_s * RATE)]))
    process.stdin.flush()
    wait_until(lambda: triton.requests and not bytes_in(process.stdin))
    process.send_signal(signal.SIGINT)
    may_answer.set()
    out, _ = process.communicate()
    before, last = out.decode().splitlines()
    assert before == first.transcript.text
    assert 1000 * (said_s - second.start_s) - 200 < int(last) <= 1000 * (said_s - second.start_s)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_whose_recorder_is_silent(start, number, wait_until):
    process = start(stdout=subprocess.PIPE)
    process.stdin.write(growing(np.zeros(RATE, np.int16)))
    process.stdin.flush()
    wait_until(lambda: not bytes_in(process.stdin))
    process.send_signal(number)
    assert process.wait() == 0


def test_a_recorder_that_goes_on_writing_cannot_crash_a_command_that_ends(start, utterances, talk):
    """As a thread does that comes back from libsndfile when Python has ended."""
    processes = [start("--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        process.stdout.close()  # as after `| head`
        with contextlib.suppress(BrokenPipeError):
            for block in [
                growing(talk[:RATE]),
                *(part.tobytes() for part in np.split(np.tile(talk, 3)[: 30 * RATE], 300)),
            ]:
                process.stdin.write(block)
                process.stdin.flush()
                time.sleep(0.01)
        _, err = process.communicate()
        assert (process.returncode, err) == (1, b"")


def test_a_second_ctrl_c_ends_the_program(start, triton, late, talk, wait_until):
    triton.answer = late
    process = start(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdin.write(growing(talk))
    process.stdin.flush()
    wait_until(lambda: triton.requests)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
    assert process.returncode in (130, -signal.SIGINT)


def test_a_terminal_shows_what_is_not_final_yet(start, utterances, talk):
    ours, theirs = pty.openpty()
    process = start(stdout=theirs, env={**os.environ, "COLUMNS": "4", "LINES": "24"})
    os.close(theirs)  # so that reading ends with the command
    process.stdin.write(growing(talk))
    process.stdin.close()
    shown = b""
    while shown.count(b"\n") < 2:
        shown += os.read(ours, 1000)
    lines = shown.decode().split("\r\n")
    for line, final in zip(lines, final_lines(utterances).splitlines(), strict=False):
        *interim, last = line.split("\r\x1b[K")[1:]
        assert last == final
        assert interim
        assert all(len(text) == 3 for text in interim)
    os.close(ours)


def test_on_a_terminal_an_error_has_a_line_of_its_own(start, triton, utterances, talk):
    answer = triton.answer

    def fail_at_the_end(request, context):
        said = answer(request, context)
        if int(said["text"]) > 4000:
            context.abort(grpc.StatusCode.INTERNAL, "no")
        return said

    triton.answer = fail_at_the_end
    ours, theirs = pty.openpty()
    process = start(stdout=theirs, stderr=theirs)
    os.close(theirs)
    process.stdin.write(growing(talk))
    process.stdin.close()
    shown = b""
    while b"INTERNAL]" not in shown:
        shown += os.read(ours, 1000)
    assert b"\r\x1b[Kcarnelian-transcribe: -: live audio, from 1." in shown
    os.close(ours)


@pytest.mark.parametrize(
    ("text", "shown"), [("abc", "abc"), ("abcdef", "bcdef"), ("\u4f60\u597d\u5417", "\u597d\u5417"), ("", "")]
)
def test_the_last_cells_of_a_line_are_shown(text, shown):
    assert _last_cells(text, 5) == shown


def test_a_file_is_read_as_a_pipe_is(transcribe, endpoint, utterances, talk, tmp_path):
    path = tmp_path / "talk.flac"
    soundfile.write(path, talk, RATE)
    assert transcribe(path, "--url", endpoint.url) == (0, final_lines(utterances), "")


def test_blocks_of_an_mp3_file_are_its_samples(talk, tmp_path):
    """At a low rate, frames share bits, which were lost between blocks."""
    path = tmp_path / "talk.mp3"
    soundfile.write(path, np.repeat(talk[: 5 * RATE], 3), 48_000, compression_level=0.99, bitrate_mode="CONSTANT")
    with path.open("rb") as file:
        blocks = [block for _, block in _blocks(file)]
    assert len(blocks) > 1
    np.testing.assert_array_equal(np.concatenate(blocks), soundfile.read(path, dtype="float32")[0])


def test_what_failed_is_told_and_the_rest_is_printed(transcribe, endpoint, triton, utterances, talk, tmp_path):
    path = tmp_path / "talk.wav"
    soundfile.write(path, talk, RATE)
    finals = final_lines(utterances).splitlines()

    def fail_first(request, context):
        answer = triton_answer(request, context)
        if answer["text"] == finals[0]:
            context.abort(grpc.StatusCode.INTERNAL, "no")
        return answer

    triton_answer, triton.answer = triton.answer, fail_first
    status, out, err = transcribe(path, "--url", endpoint.url)
    assert (status, out) == (1, f"{finals[1]}\n")
    assert err.startswith(f"carnelian-transcribe: {path}: live audio, from 1.")
    assert err.count("\n") == 1


def test_an_output_that_cannot_be_written_ends_it(start, utterances, talk):
    with Path("/dev/full").open("w") as full:
        process = start(stdout=full, stderr=subprocess.PIPE)
    _, err = process.communicate(growing(talk))
    first, *_ = err.decode().splitlines()  # Python may tell by itself that it could not flush it at the end
    assert first == "carnelian-transcribe: -: the standard output cannot be written: No space left on device"
    assert b"Traceback" not in err
    assert process.returncode > 0


def test_an_output_that_nobody_reads_ends_it_without_a_word(start, utterances, talk):
    process = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, err = process.communicate(growing(talk))
    assert (process.returncode, err) == (1, b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "libsndfile cannot read it as it comes"),
        (b"hello world", "libsndfile cannot read it as it comes"),
        (
            growing(np.zeros(0, np.int16)).replace(b"data\xff\xff\xff\xff", b"data\0\0\0\0"),
            "none that its header counts",
        ),
        (growing(np.zeros(0, np.int16)), "no samples"),
    ],
)
def test_what_cannot_be_read_is_told(through_pipe, data, words):
    status, out, err = through_pipe(data)
    assert (status, out) == (1, "")
    assert err.startswith("carnelian-transcribe: -: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_pipe_of_adpcm_is_refused_for_it_would_have_no_end(through_pipe, talk):
    sink = io.BytesIO()
    soundfile.write(sink, talk, RATE, format="WAV", subtype="MS_ADPCM")
    status, out, err = through_pipe(sink.getvalue())
    assert (status, out) == (1, "")
    assert "MS_ADPCM cannot be read from a pipe" in err


def test_a_pipe_of_mp3_is_read_unless_it_counts_its_frames(through_pipe, utterances, talk):
    """libsndfile takes a pipe of MP3 that does for a file, loses its place and decodes noise."""
    sink = io.BytesIO()
    soundfile.write(sink, talk, RATE, format="MP3")
    counted = sink.getvalue()
    plain = counted[counted.index(counted[:2], 4) :]  # without its first frame, which counts the others
    status, out, err = through_pipe(plain)
    assert (status, out.count("\n"), err) == (0, 2, "")
    status, out, err = through_pipe(counted)
    assert (status, out) == (1, "")
    assert err.startswith("carnelian-transcribe: -: MP3 that counts its frames cannot be read as it comes")
    assert err.count("\n") == 1


def test_a_wrong_option_is_told_once(through_pipe, triton, utterances, talk):
    triton.answer = lambda request, context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "wrong option: no such")
    status, out, err = through_pipe(growing(talk), "--option", "colour=red")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1


def test_text_that_is_not_shown_asks_for_no_interim_results(through_pipe, triton, utterances, talk):
    triton.requests.clear()
    through_pipe(growing(talk))
    assert len(triton.requests) == 2


@pytest.mark.parametrize("words", [["--interim", "0"], ["--interim", "60"]])
def test_json_may_have_final_results_alone(through_pipe, utterances, talk, words):
    _, out, _ = through_pipe(growing(talk), "--json", *words)
    assert [json.loads(line)["is_final"] for line in out.splitlines()] == [True, True]


def test_an_interim_result_comes_after_so_many_seconds(through_pipe, utterances, talk):
    _, out, _ = through_pipe(growing(talk), "--json", "--interim", "2")
    first = json.loads(out.splitlines()[0])
    assert not first["is_final"]
    assert 2 <= first["end"] - first["start"] < 2.3


def test_a_pause_may_be_longer(through_pipe, utterances, talk):
    _, out, _ = through_pipe(growing(talk), "--pause", "3")
    [heard] = out.splitlines()
    assert int(heard) > sum(int(line) for line in final_lines(utterances).split())


@pytest.mark.usefixtures("says_how_long")
def test_an_utterance_is_cut_where_it_would_be_longer_than_asked_for(through_pipe, voices):
    _, out, _ = through_pipe(growing(np.tile(voices[0], 3)), "--longest-piece", "5")
    assert max(map(int, out.splitlines())) <= 5000


def test_a_file_that_is_not_there_is_told(transcribe, tmp_path):
    path = tmp_path / "missing.wav"
    assert transcribe(path) == (1, "", f"carnelian-transcribe: {path}: No such file or directory\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--format", "srt"],
        ["b.wav"],
        ["--long"],
        ["--out", "texts"],
        ["--longest-piece", "3"],
        ["--pause", "0"],
        ["--interim", "-1"],
        ["--interim", "nan"],
        ["--concurrency", "2"],
        ["--option", "pause_s=1"],
    ],
)
def test_wrong_use_exits_with_2(transcribe, words):
    status, out, err = transcribe("a.wav", *words)
    assert (status, out) == (2, "")
    assert err
