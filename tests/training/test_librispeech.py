import contextlib
import functools
import hashlib
import http.server
import re
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_training.cli import main
from carnelian_training.corpora import download, librispeech
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import read_manifest
from carnelian_training.data.plan import Item
from carnelian_training.features import FeatureSettings
from carnelian_training.lock import locked
from carnelian_training.replacement import WriteError

NOISE = np.random.default_rng(0).standard_normal(48000).astype(np.float32) * 0.1


class OpenSlr(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with Range requests, and hangs up in the middle where it is told to."""

    cut_after: int | None = None
    resumes = True
    is_endless = False
    both = threading.Barrier(2, timeout=60)
    """Of endless requests, the first waits for the second."""
    requests: list[str]
    """What each asks for in its header `Range`."""

    def do_GET(self):
        file = Path(self.translate_path(self.path))
        self.requests.append(self.headers.get("Range", ""))
        if self.is_endless:
            self.both.wait()
        if not file.exists():
            self.send_error(404)
            return
        content = file.read_bytes()
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.resumes else None
        start = int(asked[1]) if asked else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while self.is_endless:
                self.wfile.write(b"0" * 10)
                time.sleep(0.01)
        end = len(content) if type(self).cut_after is None else start + type(self).cut_after
        type(self).cut_after = None
        self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def root(tmp_path):
    """The folder of a server in OpenSLR's layout with two tiny parts."""
    root = tmp_path / "server"
    for resource, part in ((12, "dev-clean"), (31, "train-clean-5")):
        chapter = tmp_path / "source" / "LibriSpeech" / part / "84" / "121123"
        chapter.mkdir(parents=True)
        for i, text in enumerate(("GO", "DON'T GO")):
            soundfile.write(chapter / f"84-121123-000{i}.flac", NOISE[: 16000 * (i + 1)], 16000)
            with (chapter / "84-121123.trans.txt").open("a") as file:
                file.write(f"84-121123-000{i} {text}\n")
        (root / str(resource)).mkdir(parents=True)
        with tarfile.open(root / str(resource) / f"{part}.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "source" / "LibriSpeech" / part, f"LibriSpeech/{part}")
    return root


@pytest.fixture
def handler():
    return type("Handler", (OpenSlr,), {"requests": []})


@pytest.fixture
def url(root, handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def checksums(root, monkeypatch):
    """The tiny parts' own; those of OpenSLR stand in the code."""
    for path in root.rglob("*.tar.gz"):
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(librispeech.PARTS, path.name.removesuffix(".tar.gz"), (int(path.parent.name), md5))


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def prepare(out, url, checksums):
    """Prepares the named parts, or `dev-clean`, in `out`."""
    return lambda *parts: librispeech.prepare(out, parts or ["dev-clean"], url=url)


@pytest.mark.usefixtures("checksums")
def test_librispeech_is_fetched_unpacked_and_listed_once(handler, url, tmp_path, call):
    out = tmp_path / "new"
    command = ("prepare", "librispeech", out, "--part", "dev-clean", "--part", "train-clean-5", "--url", url)
    assert call(main, *command)[0] == 0
    clips = read_manifest(out / "dev-clean.jsonl")
    assert [(clip.text, clip.duration) for clip in clips] == [("go", 1.0), ("don't go", 2.0)]
    assert clips[0].audio_filepath == out / "LibriSpeech/dev-clean/84/121123/84-121123-0000.flac"
    assert clips[0].extra == {"speaker": "84", "source": "dev-clean"}
    (batch,) = load([[Item(clip) for clip in clips]], FeatureSettings(), 1)
    assert batch.lengths.tolist() == [101, 201]
    locks = {".dev-clean.lock", ".train-clean-5.lock"}
    assert {path.name for path in out.iterdir()} - locks == {"LibriSpeech", "dev-clean.jsonl", "train-clean-5.jsonl"}
    handler.requests.clear()
    assert call(main, *command)[0] == 0
    assert handler.requests == []


def test_a_cut_connection_is_resumed_where_it_ended(prepare, handler, out):
    handler.cut_after = 1000
    prepare()
    assert handler.requests == ["", "bytes=1000-"]
    assert len(read_manifest(out / "dev-clean.jsonl")) == 2


@pytest.mark.parametrize(("num_bytes", "resumes"), [(700, True), (700, False), (None, True)])
def test_a_partial_file_of_an_earlier_run_is_gone_on_with(prepare, handler, root, out, num_bytes, resumes):
    handler.resumes = resumes
    content = (root / "12" / "dev-clean.tar.gz").read_bytes()[:num_bytes]
    (out / "dev-clean.fetched.tar.gz.partial").write_bytes(content)
    prepare()
    assert handler.requests == [f"bytes={len(content)}-"]
    assert len(read_manifest(out / "dev-clean.jsonl")) == 2


def test_a_wrong_checksum_is_refused_and_leaves_nothing_to_unpack(out, url, call):
    command = ("prepare", "librispeech", out, "--part", "dev-clean", "--url", url)  # whose archive is not OpenSLR's
    status, _, err = call(main, *command)
    assert status == 1
    assert "must have the MD5 42e2234ba48799c1f50f24a7926300a1, but has" in err
    assert [path.name for path in out.iterdir()] == [".dev-clean.lock"]


def test_an_archive_that_is_there_is_used_and_stays(prepare, handler, root, out):
    (out / "dev-clean.tar.gz").write_bytes((root / "12" / "dev-clean.tar.gz").read_bytes())
    prepare()
    assert handler.requests == []
    assert (out / "dev-clean.tar.gz").exists()


def test_a_server_without_the_file_is_not_asked_again(prepare, handler, root):
    (root / "12" / "dev-clean.tar.gz").unlink()
    with pytest.raises(OSError, match="answers 404"):
        prepare()
    assert len(handler.requests) == 1


def test_a_dead_server_is_given_up_and_the_message_says_how_to_go_on(tmp_path, monkeypatch):
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", lambda _: None)
    with pytest.raises(OSError, match=r"gave up after 5 attempts .* from byte 0"):
        download.download("http://127.0.0.1:9/x", tmp_path / "x", "0", stop)


def test_a_file_that_cannot_be_opened_is_no_fault_of_the_server(prepare, handler, out, tmp_path):
    (out / "dev-clean.fetched.tar.gz.partial").symlink_to(tmp_path / "not mounted" / "x")
    with pytest.raises(WriteError, match=r"partial could not be written: .*No such file"):
        prepare()
    assert handler.requests == [""]


def test_the_failure_of_a_part_stops_the_others_at_once(prepare, handler, out, monkeypatch):
    """And Ctrl-C likewise."""
    monkeypatch.setattr(download, "BLOCK_BYTES", 10)
    handler.is_endless = True
    with pytest.raises(OSError, match="answers 404"):
        prepare("train-clean-5", "dev-other")
    assert handler.requests.count("") == 2  # of which one is refused
    assert not (out / "LibriSpeech").exists()


def test_one_process_prepares_a_part(prepare, handler, out):
    with locked(out / ".dev-clean.lock", ""), pytest.raises(ValueError, match=r"another one does so in .*: wait for"):
        prepare()
    assert handler.requests == []


def test_a_part_that_is_named_twice_is_prepared_once(prepare, handler):
    assert len(prepare("dev-clean", "dev-clean")) == 1
    assert handler.requests == [""]


def test_an_interrupted_unpacking_is_made_up_for_and_leaves_no_archive(prepare, handler, out, monkeypatch):
    def fail(self, path, *_, **__):
        (path / "LibriSpeech").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(tarfile.TarFile, "extractall", fail)
        with pytest.raises(WriteError, match="No space left"):
            prepare()
    assert {path.name for path in out.iterdir()} == {".dev-clean.lock", "dev-clean.fetched.tar.gz"}
    prepare()
    assert handler.requests == [""]
    assert {path.name for path in out.iterdir()} == {".dev-clean.lock", "LibriSpeech", "dev-clean.jsonl"}


def test_a_disk_without_room_is_no_fault_of_the_server(prepare, handler, out, room):
    with room(1000), pytest.raises(WriteError, match=r"dev-clean.*\.partial could not be written, and keeps"):
        prepare()
    assert handler.requests == [""]
    prepare()
    assert handler.requests == ["", "bytes=1000-"]
    assert len(read_manifest(out / "dev-clean.jsonl")) == 2


def test_an_archive_that_finds_no_room_is_named(prepare, root, out, room):
    (out / "dev-clean.tar.gz").write_bytes((root / "12" / "dev-clean.tar.gz").read_bytes())
    with room(1000), pytest.raises(WriteError, match=r"dev-clean\.unpacking could not be written: File too large"):
        prepare()


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match="but not train-clean-1000"):
        librispeech.prepare(tmp_path, ["train-clean-1000"])


@pytest.mark.parametrize("line", [b"", b"84-121123-0001", b"84-121123-0001 CAF\xc9", b"84-121123-0000 GO"])
def test_a_line_of_transcripts_that_is_no_id_and_text_is_named(tmp_path, line):
    chapter = tmp_path / "LibriSpeech" / "dev-clean" / "84" / "121123"
    chapter.mkdir(parents=True)
    soundfile.write(chapter / "84-121123-0000.flac", NOISE, 16000)
    (chapter / "84-121123.trans.txt").write_bytes(b"84-121123-0000 GO\n" + line + b"\n")
    words = f"84-121123.trans.txt, line 2: must be an id, listed once, and its text in UTF-8, found {line!r}"
    with pytest.raises(ValueError, match=re.escape(words)):
        librispeech.prepare(tmp_path, ["dev-clean"])
    assert not (tmp_path / "dev-clean.jsonl").exists()
