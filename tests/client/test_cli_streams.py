"""What `carnelian-transcribe` reads and writes: standard streams that are closed or full, encodings, and folders."""

import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "carnelian_client"]


def test_dash_is_the_standard_input(transcribe, endpoint, wav, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wav)))
    assert transcribe("-", "--url", endpoint.url) == (0, f"{len(wav)} bytes\n", "")
    status, out, err = transcribe("-", "--url", endpoint.url)  # nothing is left
    assert (status, out) == (1, "")
    assert err.startswith("carnelian-transcribe: -: ")


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_the_wait_for_a_pipe_that_nobody_writes(endpoint, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([*COMMAND, pipe, "--url", endpoint.url], stderr=subprocess.DEVNULL) as command:
        try:
            writer = None
            while writer is None and command.poll() is None:
                time.sleep(0.01)
                with contextlib.suppress(OSError):  # nobody reads it yet
                    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            assert writer is not None
            command.send_signal(signal.SIGINT)
            assert command.wait(timeout=60) == 130
            os.close(writer)
        finally:
            command.kill()


def test_a_closed_standard_input_is_wrong_use():
    closed = ["/bin/sh", "-c", '"$@" - <&-', "sh", *COMMAND]
    done = subprocess.run(closed, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "standard input, but it is closed" in done.stderr.decode()


@pytest.mark.parametrize("words", [[], ["--long"]])
def test_a_standard_input_that_cannot_be_read_fails_alone(endpoint, clip, words):
    unreadable = ["/bin/sh", "-c", '"$@" 0>/dev/null', "sh", *COMMAND, clip, "-", clip, "--url", endpoint.url, *words]
    done = subprocess.run(unreadable, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [str(clip), str(clip)]
    assert done.stderr == "carnelian-transcribe: -: the standard input cannot be read: Bad file descriptor\n"


def test_with_a_closed_standard_error_failures_do_not_go_among_the_transcripts(endpoint, clip):
    closed = ["/bin/sh", "-c", '"$@" 2>&-', "sh", *COMMAND, "missing.wav", clip, "--url", endpoint.url]
    done = subprocess.run(closed, stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert [line.partition(b"\t")[0].decode() for line in done.stdout.splitlines()] == [str(clip)]


def test_a_closed_standard_output_is_wrong_use(endpoint, clip):
    closed = ["/bin/sh", "-c", '"$@" >&-', "sh", *COMMAND, clip, "--url", endpoint.url]
    done = subprocess.run(closed, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "standard output must be open" in done.stderr.decode()
    done = subprocess.run([*closed, "--out", clip.parent], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert clip.with_suffix(".txt").is_file()


def test_a_transcript_that_cannot_be_written_costs_the_others_nothing(transcribe, endpoint, clip, wav, tmp_path):
    other = tmp_path / "other.wav"
    other.write_bytes(wav)
    longest = clip.rename(tmp_path / f"{'a' * 251}.wav")
    words = ("--url", endpoint.url, "--out", tmp_path / "out", "--format", "json")
    status, _, err = transcribe(longest, other, *words)
    assert status == 1
    target = tmp_path / "out" / f"{longest.stem}.json"
    assert err == f"carnelian-transcribe: {longest}: {target} cannot be written: File name too long\n"
    assert json.loads((tmp_path / "out" / "other.json").read_text())["text"] == f"{len(wav)} bytes"


def test_a_full_disk_costs_no_earlier_transcript(transcribe, endpoint, clip, tmp_path, room):
    out = tmp_path / "out"
    out.mkdir()
    (out / "earlier.txt").write_text("a good one\n")
    (out / "clip.txt").symlink_to("earlier.txt")
    words = (clip, "--url", endpoint.url, "--out", out, "--existing", "replace")
    with room(0):
        status, _, err = transcribe(*words)
    assert (status, err) == (1, f"carnelian-transcribe: {clip}: {out}/clip.txt cannot be written: File too large\n")
    assert (out / "earlier.txt").read_text() == "a good one\n"
    assert transcribe(*words)[0] == 0
    assert (out / "clip.txt").read_text() == f"{clip.stat().st_size} bytes\n"
    assert sorted(path.name for path in out.iterdir() if not path.is_symlink()) == ["earlier.txt"]


def test_a_transcript_keeps_its_mode_and_a_pipe_stays_one(transcribe, endpoint, clip, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "clip.txt").touch(0o600)
    words = (clip, "--url", endpoint.url, "--out", out, "--existing", "replace")
    assert transcribe(*words)[0] == 0
    assert stat.S_IMODE((out / "clip.txt").stat().st_mode) == 0o600
    (out / "clip.txt").unlink()
    os.mkfifo(out / "clip.txt")
    reader = os.open(out / "clip.txt", os.O_RDONLY | os.O_NONBLOCK)
    assert transcribe(*words)[0] == 0
    assert os.read(reader, 100).decode() == f"{clip.stat().st_size} bytes\n"
    os.close(reader)


def test_what_the_standard_output_cannot_spell_costs_the_other_files_nothing(endpoint, wav, tmp_path):
    names = ["h\u00e9.wav", os.fsdecode(b"\xff.wav"), os.fsdecode("\u00e9".encode() + b"\xff.wav"), "b.wav"]
    for name in names:
        (tmp_path / name).write_bytes(wav)
    done = subprocess.run(
        [*COMMAND, *names, "--url", endpoint.url],
        env=os.environ | {"PYTHONIOENCODING": "ascii:surrogateescape"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(b"\t")[0] for line in done.stdout.splitlines()] == [
        *(b"h\\xe9.wav", b"\xff.wav", b"\\xe9\xff.wav", b"b.wav")
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "latin-1:replace", "ascii:surrogateescape"])
def test_json_is_readable_and_json_in_any_encoding(endpoint, triton, answers, wav, tmp_path, encoding):
    names = ["Stra\u00dfe \u0142\U0001f600.wav", os.fsdecode(b"\xff.wav")]
    for name in names:
        (tmp_path / name).write_bytes(wav)
    triton.answer = answers("gr\u00fcn")
    commands = [[*COMMAND, *names, "--json", "--url", endpoint.url]]
    commands.append([*commands[0], "--out", tmp_path / "out"])
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    printed, _ = [
        subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True).stdout
        for command in commands
    ]
    assert printed.decode() == printed.decode(encoding.partition(":")[0])  # JSON is UTF-8 wherever it goes
    first, second = map(json.loads, printed.decode().splitlines())
    assert [first["file"], second["file"]] == names
    assert first["text"] == second["text"] == "gr\u00fcn"
    assert ("gr\u00fcn".encode() in printed) == (encoding == "utf-8")
    for name, expected in zip(names, (first, second), strict=True):
        content = (tmp_path / "out" / Path(name).with_suffix(".json")).read_text(encoding="utf-8")
        assert "gr\u00fcn" in content
        assert json.loads(content) | {"request_id": ""} == expected | {"request_id": ""}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii:surrogateescape"])
def test_webvtt_is_utf_8_whatever_the_terminal_has_and_subrip_is_as_that(endpoint, triton, answers, clip, encoding):
    triton.answer = answers("gr\u00fcn \u0142")
    webvtt, subrip = [
        subprocess.run(
            [*COMMAND, clip, "--format", kind, "--url", endpoint.url],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        ).stdout.splitlines()
        for kind in ("vtt", "srt")
    ]
    assert webvtt[3] == "gr\u00fcn \u0142".encode()
    assert subrip[2] == "gr\u00fcn \u0142".encode(encoding.partition(":")[0], "backslashreplace")


def test_a_full_disk_behind_the_standard_output_is_one_line(endpoint, clip):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, clip, "--url", endpoint.url], stdout=full, stderr=subprocess.PIPE, check=False)
    lines = done.stderr.decode().splitlines()
    assert lines == [f"carnelian-transcribe: {clip}: the standard output cannot be written: No space left on device"]
    assert done.returncode == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_text_that_the_standard_output_takes_in_part_is_an_error(endpoint, clip, tmp_path, unbuffered):
    out = tmp_path / "out"
    out.write_bytes(bytes(1020))
    with out.open("ab") as opened:
        done = subprocess.run(
            ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *COMMAND, clip, "--url", endpoint.url],  # 1 KiB
            stdout=opened,
            stderr=subprocess.PIPE,
            # The limit would cut the bytecode of modules too, and every later import would fail.
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
    lines = done.stderr.decode().splitlines()
    assert lines == [f"carnelian-transcribe: {clip}: the standard output cannot be written: File too large"]
    assert done.returncode == 1


def test_transcripts_are_written_into_a_folder(transcribe, endpoint, clip, tmp_path):
    arguments = (clip, "--url", endpoint.url, "--format", "vtt", "--out", tmp_path / "subtitles")
    assert transcribe(*arguments)[:2] == (0, "")
    assert (tmp_path / "subtitles" / "clip.vtt").read_text().startswith("WEBVTT")


def test_no_file_overwrites_anothers_transcript(transcribe, endpoint, clip, wav, tmp_path):
    other = tmp_path / "other" / "clip.flac"
    other.parent.mkdir()
    other.write_bytes(wav)
    status, out, err = transcribe(clip, other, "--url", endpoint.url, "--out", tmp_path / "texts")
    assert (status, out) == (2, "")
    assert "files of different names" in err
    assert not (tmp_path / "texts").exists()


def test_a_file_is_no_folder_to_write_into(transcribe, endpoint, clip):
    status, out, err = transcribe(clip, "--url", endpoint.url, "--out", clip)
    assert (status, out) == (2, "")
    assert "must be a folder" in err
