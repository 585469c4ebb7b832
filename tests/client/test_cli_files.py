"""Which files `carnelian-transcribe` reads and writes: lists, folders that are kept, and what exists already."""

import io
import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def archive(tmp_path, wav):
    """Recordings in folders, two of which have the same name."""
    files = [tmp_path / "in" / name for name in ("1987/tape 01/rec.wav", "1987/tape 02/rec.wav", "talk.wav")]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(wav + bytes(2 * i))
    return files


@pytest.fixture
def write(transcribe, endpoint, tmp_path):
    """Writes transcripts of files into a folder; returns the status, the printed output and the errors in one line."""

    def write(*words):
        status, out, err = transcribe(*words, "--url", endpoint.url, "--out", tmp_path / "out")
        return status, out, " ".join(err.split())

    return write


def written(folder):
    """What the files below a folder hold, by their names."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_exists_is_refused_before_anything_is_sent(write, triton, archive, tmp_path):
    assert write(archive[0])[0] == 0
    before = written(tmp_path / "out")
    status, out, err = write(archive[1], archive[2])  # the next call of xargs
    assert (status, out) == (2, "")
    assert f"--out must not replace files, but {tmp_path}/out/rec.txt exists;" in err
    assert "--existing skip goes on with a run that was interrupted" in err
    assert written(tmp_path / "out") == before
    assert len(triton.requests) == 1


def test_the_first_of_several_that_exist_is_named_with_their_number(write, archive, tmp_path):
    assert write(*archive, "--root", tmp_path)[0] == 0
    status, _, err = write(*archive, "--root", tmp_path)
    assert status == 2
    assert f"but 3 exist, the first of them {tmp_path}/out/in/1987/tape 01/rec.txt;" in err


def test_what_is_there_can_be_skipped_unread(write, triton, archive, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "talk.srt").touch()  # of silence
    assert write(archive[0], tmp_path / "talk.wav", "--format", "srt", "--existing", "skip") == (
        *(0, "", "carnelian-transcribe: 1 of 2 files were transcribed already"),
    )
    assert (tmp_path / "out" / "talk.srt").read_bytes() == b""
    assert len(triton.requests) == 1
    status, _, err = write(
        archive[0], tmp_path / "talk.wav", tmp_path / "none.wav", "--format", "srt", "--existing", "skip"
    )
    assert status == 1
    assert err == (
        f"carnelian-transcribe: {tmp_path}/none.wav: No such file or directory "
        "carnelian-transcribe: 2 of 3 files were transcribed already"
    )


def test_what_is_there_can_be_replaced(write, archive, wav, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rec.txt").write_text("old")
    assert write(archive[0], "--existing", "replace") == (0, "", "")
    assert written(tmp_path / "out") == {"rec.txt": f"{len(wav)} bytes\n"}


@pytest.mark.parametrize("existing", ["refuse", "skip", "replace"])
def test_no_transcript_replaces_a_recording(transcribe, endpoint, triton, archive, wav, existing):
    recording = archive[2].rename(archive[2].with_suffix(".txt"))
    words = (archive[0], recording, "--url", endpoint.url, "--out", recording.parent, "--existing", existing)
    status, _, err = transcribe(*words)
    assert status == 2
    assert f"but {recording} is {recording} itself" in " ".join(err.split())
    assert recording.read_bytes() == wav + bytes(4)
    link = recording.with_name("link.wav")
    link.symlink_to(recording)
    link.with_suffix(".txt").symlink_to(recording)
    status, _, err = transcribe(link, *words[2:])
    assert status == 2
    assert f"but {link.with_suffix('.txt')} is {link} itself" in " ".join(err.split())
    assert not triton.requests


@pytest.mark.parametrize("existing", ["refuse", "skip", "replace"])
def test_a_folder_is_no_transcript(write, triton, archive, wav, existing):
    inner = archive[2].with_suffix(".txt") / "rec.wav"  # its transcript needs a folder where that of `talk.wav` goes
    inner.parent.mkdir()
    inner.write_bytes(wav)
    for _ in range(2):  # the second time, the folder is there
        status, _, err = write(archive[2], inner, "--root", archive[2].parent, "--existing", existing)
        assert status == 2
        assert "out/talk.txt is a folder; move it away" in err
    assert not triton.requests


def test_a_link_to_nothing_exists(write, triton, archive, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rec.txt").symlink_to("gone")
    assert "out/rec.txt exists" in write(archive[0])[2]
    assert write(archive[0], "--existing", "skip")[0] == 0
    assert not triton.requests


@pytest.mark.parametrize("existing", ["skip", "replace"])
def test_no_transcript_replaces_the_list(transcribe, endpoint, archive, existing):
    listed = archive[2].with_suffix(".txt")
    listed.write_text(f"{archive[2]}\n")
    words = ("--url", endpoint.url, "--out", listed.parent, "--existing", existing)
    status, _, err = transcribe("--files-from", listed, *words)
    assert status == 2
    assert f"but {listed} is {listed} itself" in " ".join(err.split())


@pytest.mark.parametrize("existing", ["refuse", "skip"])
def test_what_appears_meanwhile_is_not_replaced(write, triton, make_result, archive, tmp_path, existing):
    """Two calls of xargs may run at a time."""
    target = tmp_path / "out" / "rec.txt"

    def answer(request, context):
        target.write_text("another's")
        return make_result("ours")

    triton.answer = answer
    assert write(archive[0], "--existing", existing) == (
        *(1, "", f"carnelian-transcribe: {archive[0]}: {target} cannot be written: File exists"),
    )
    assert target.read_text() == "another's"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    transcribe, endpoint, triton, wav, everyones, another_user
):
    clip = everyones / "clip.wav"
    clip.write_bytes(wav)
    (everyones / "out").mkdir()
    (everyones / "out").chmod(0o555)
    with another_user():
        status, _, err = transcribe(clip, "--url", endpoint.url, "--out", everyones / "out")
    assert status == 2
    assert f"--out must be a folder that can be written, but {everyones}/out cannot" in " ".join(err.split())
    assert not triton.requests


def test_folders_below_the_root_are_kept(write, archive, wav, tmp_path):
    assert write(*archive, archive[0], "--root", tmp_path / "in") == (0, "", "")
    assert written(tmp_path / "out") == {
        "1987/tape 01/rec.txt": f"{len(wav)} bytes\n",
        "1987/tape 02/rec.txt": f"{len(wav) + 2} bytes\n",
        "talk.txt": f"{len(wav) + 4} bytes\n",
    }


def test_the_root_and_the_files_may_be_relative(write, archive, wav, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path / "in" / "1987")
    assert write("tape 01/rec.wav", "../1987/./tape 02/rec.wav", "--root", "..") == (0, "", "")
    assert sorted(written(tmp_path / "out")) == ["1987/tape 01/rec.txt", "1987/tape 02/rec.txt"]


@pytest.mark.parametrize("name", ["talk.wav", "1987/../talk.wav", "1987"])
def test_a_file_outside_the_root_is_wrong_use(write, archive, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path / "in")
    status, _, err = write(archive[0], name, "--root", "1987")
    assert status == 2
    assert f"--root must be a folder above all files, but {name} is not below 1987" in err
    assert not (tmp_path / "out").exists()


def test_a_clash_names_both_files_and_the_root_where_it_helps(write, archive, wav):
    status, _, err = write(*archive)
    assert status == 2
    assert f"but {archive[0]} and {archive[1]} would both be" in err
    assert "--root DIR keeps the folders below DIR" in err
    beside = archive[0].with_suffix(".flac")
    beside.write_bytes(wav)
    for root in [(), ("--root", archive[2].parent)]:
        status, _, err = write(archive[0], beside, *root)
        assert status == 2
        assert f"but {archive[0]} and {beside} would both be" in err
        assert "--root" not in err.partition("would both be")[2]


def test_a_file_under_two_spellings_gets_no_advice_that_cannot_help(write, archive, monkeypatch):
    monkeypatch.chdir(archive[0].parent)
    status, _, err = write(archive[0].name, f"./{archive[0].name}")
    assert status == 2
    assert "would both be" in err
    assert "--root" not in err.partition("would both be")[2]


def test_the_standard_input_has_its_place_with_a_root_too(write, archive, wav, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wav)))
    assert write(archive[0], "-", "--root", tmp_path) == (0, "", "")
    assert sorted(written(tmp_path / "out")) == ["in/1987/tape 01/rec.txt", "stdin.txt"]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "\r\n", "\0"])
def test_names_may_come_from_a_list(transcribe, endpoint, archive, wav, tmp_path, separator):
    names = [archive[0].with_name("a\nb.wav") if separator == "\0" else archive[0], archive[1]]
    names[0].write_bytes(wav)
    listed = tmp_path / "list"
    mark = "\ufeff" if separator == "\r\n" else ""  # as editors of Windows write it
    listed.write_text(mark + "".join(f"{name}{separator}" for name in names))
    status, out, err = transcribe(archive[2], "--files-from", listed, "--url", endpoint.url)
    assert (status, err) == (0, "")
    assert [line.split("\t")[0] for line in out.splitlines()] == [
        str(name).replace("\n", r"\n") for name in (archive[2], *names)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="names are text elsewhere")
def test_a_list_on_the_standard_input_may_have_any_name(endpoint, wav, tmp_path):
    (tmp_path / os.fsdecode(b"od\xffd.wav")).write_bytes(wav)
    words = [sys.executable, "-m", "carnelian_client", "--files-from", "-", "--json", "--url", endpoint.url]
    done = subprocess.run(
        ["/bin/sh", "-c", 'find . -name "*.wav" -print0 | "$@"', "sh", *words],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert os.fsencode(json.loads(done.stdout)["file"]) == b"./od\xffd.wav"


def test_a_list_of_one_file_prints_its_name(transcribe, endpoint, clip, wav, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(os.fsencode(clip))))
    assert transcribe("--files-from", "-", "--url", endpoint.url) == (0, f"{clip}\t{len(wav)} bytes\n", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "has none"),
        (b"\n \n", "has none"),
        (b"\0", "has none"),
        (b"a.wav\n-\n", "- must be audio or the list"),
        ("a.wav\n".encode("utf-16"), "must be a list in UTF-8, but - is in UTF-16"),
    ],
    ids=["missing", "empty", "blank", "NUL", "standard input twice", "UTF-16"],
)
def test_a_list_without_names_is_wrong_use(transcribe, tmp_path, monkeypatch, content, message):
    listed = tmp_path / "list"
    if content is not None:
        listed = "-"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    status, out, err = transcribe("--files-from", listed)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())


def test_no_file_at_all_is_wrong_use(transcribe):
    status, _, err = transcribe()
    assert status == 2
    assert "FILE... or --files-from must name an audio file" in " ".join(err.split())


def test_one_transcription_is_written_in_several_formats(write, triton, archive, wav, tmp_path):
    assert write(archive[0], "--format", "srt", "--format", "text", "--json", "--format", "srt") == (0, "", "")
    assert len(triton.requests) == 1
    files = written(tmp_path / "out")
    assert sorted(files) == ["rec.json", "rec.srt", "rec.txt"]
    assert json.loads(files["rec.json"])["text"] + "\n" == files["rec.txt"] == f"{len(wav)} bytes\n"
    assert files["rec.srt"].startswith("1\n00:00:00,000 --> ")


def test_a_file_is_skipped_when_all_its_formats_are_there(write, triton, archive, tmp_path):
    assert write(archive[0], "--format", "srt")[0] == 0
    (tmp_path / "out" / "rec.srt").write_text("corrected by hand")
    words = (archive[0], "--format", "srt", "--format", "ctm", "--existing", "skip")
    assert write(*words) == (0, "", "")
    assert len(triton.requests) == 2
    assert written(tmp_path / "out")["rec.srt"] == "corrected by hand"
    assert write(*words) == (0, "", "carnelian-transcribe: 1 of 1 files were transcribed already")
    assert len(triton.requests) == 2


@pytest.mark.parametrize(
    "words", [("--format", "srt", "--format", "vtt"), ("--format", "text", "--json"), ("--json", "--format", "srt")]
)
def test_what_is_printed_has_one_format(transcribe, endpoint, triton, clip, words):
    status, out, err = transcribe(clip, "--url", endpoint.url, *words)
    assert (status, out) == (2, "")
    assert "must have one format" in err
    assert not triton.requests


def test_a_format_may_be_named_twice(transcribe, endpoint, clip, wav):
    assert transcribe(clip, "--json", "--format", "json", "--url", endpoint.url)[0] == 0


def test_files_that_one_ctm_cannot_tell_apart_are_named(transcribe):
    status, _, err = transcribe("x.wav", "a/clip one.wav", "b/clip_one.flac", "c/clip_one.wav", "--format", "ctm")
    assert status == 2
    assert "but a/clip one.wav and b/clip_one.flac are both clip_one" in " ".join(err.split())


@pytest.mark.parametrize("words", [("--root", "."), ("--existing", "skip"), ("--stream", "--files-from", "LIST")])
def test_options_of_files_do_not_go_with_what_is_printed(transcribe, clip, tmp_path, words):
    listed = tmp_path / "list"
    listed.write_text(str(clip))
    status, out, err = transcribe(*([] if "LIST" in words else [clip]), *(listed if w == "LIST" else w for w in words))
    assert (status, out) == (2, "")
    assert "must" in err
