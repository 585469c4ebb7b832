import gzip
import json
from pathlib import Path

import pytest
from carnelian_perf.manifest import read_manifest as read_in_perf
from carnelian_training.data.manifest import Clip, read_manifest, read_manifest_leniently, write_manifest

LINE = {"audio_filepath": "a/b.ogg", "duration": 1.5, "text": "hello"}


def write(tmp_path, *lines):
    path = tmp_path / "manifest.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_relative_paths_are_taken_from_the_folder_of_the_manifest(tmp_path):
    [clip] = read_manifest(write(tmp_path, json.dumps(LINE)))
    assert clip == Clip(tmp_path / "a/b.ogg", 1.5, "hello")


def test_absolute_paths_stay(tmp_path):
    [clip] = read_manifest(write(tmp_path, json.dumps(LINE | {"audio_filepath": "/data/b.ogg"})))
    assert clip.audio_filepath.as_posix() == "/data/b.ogg"


def test_a_tilde_is_the_home_folder_as_in_nemo(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    [clip] = read_manifest(write(tmp_path, json.dumps(LINE | {"audio_filepath": "~/b.ogg"})))
    assert clip.audio_filepath == tmp_path / "home" / "b.ogg"


def test_a_manifest_that_is_not_there_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^a\.jsonl must be a manifest.*directory, {tmp_path}\), but: No such file"):
        read_manifest(Path("a.jsonl"))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/a\.jsonl must be a manifest, JSON lines, but: No such file"):
        read_manifest(tmp_path / "a.jsonl")


@pytest.mark.parametrize("address", ["s3://bucket/b.ogg", "file:///data/b.ogg"])
def test_an_address_is_refused_as_no_path(tmp_path, address):
    with pytest.raises(ValueError, match=f"must be the path of a sound file, found '{address}'"):
        read_manifest(write(tmp_path, json.dumps(LINE | {"audio_filepath": address})))


def test_other_fields_travel_along(tmp_path):
    [clip] = read_manifest(write(tmp_path, json.dumps(LINE | {"speaker": "p225", "source": "vctk"})))
    assert clip.extra == {"speaker": "p225", "source": "vctk"}


def test_white_space_of_a_transcript_is_one_space_as_in_evaluation(tmp_path):
    [clip] = read_manifest(write(tmp_path, json.dumps(LINE | {"text": " go\tso  far\u00a0on\n"})))
    assert clip.text == "go so far on"


def test_empty_lines_are_skipped(tmp_path):
    assert len(read_manifest(write(tmp_path, "", json.dumps(LINE), "", json.dumps(LINE)))) == 2


def test_what_is_written_is_read_again(tmp_path):
    clips = [
        Clip(tmp_path / "clips/ä.ogg", 1.25, "one", {"speaker": "x"}),
        Clip(tmp_path.parent / "elsewhere.wav", 2.0, "two", offset=1.5),
    ]
    path = tmp_path / "manifest.jsonl"
    write_manifest(path, clips)
    assert read_manifest(path) == clips
    assert read_manifest(path)[0].extra == {"speaker": "x"}
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["audio_filepath"] == "clips/ä.ogg"


def test_relative_paths_are_written_from_the_folder_of_the_manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = (tmp_path / "corpus" / "manifest.jsonl").relative_to(tmp_path)
    write_manifest(path, [Clip(path.parent / "a.ogg", 1.0, "one")])
    assert json.loads(path.read_text(encoding="utf-8"))["audio_filepath"] == "a.ogg"


def test_a_failed_write_leaves_the_old_manifest(tmp_path):
    path = write(tmp_path, json.dumps(LINE))
    before = path.read_text(encoding="utf-8")

    def clips():
        yield Clip(tmp_path / "a.ogg", 1.0, "one")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_manifest(path, clips())
    assert path.read_text(encoding="utf-8") == before
    assert [found.name for found in tmp_path.iterdir()] == ["manifest.jsonl"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (json.dumps(LINE).encode("utf-16"), "UTF-16"),
        (json.dumps(LINE).encode("utf-16-le"), "a binary file"),
        (gzip.compress(json.dumps(LINE).encode(), mtime=0), "packed by gzip"),
        (json.dumps([LINE], indent=2).encode(), "a JSON array"),
        (b"RIFF\x24\0\0\0WAVE\nfmt \n", "a binary file"),
        (json.dumps(LINE, indent=2).encode(), "JSON over several lines"),
        (b"\xef\xbb\xbfpath,duration\r\na.wav,1.5", "text that begins with b'path,duration'"),
    ],
)
def test_another_kind_of_file_is_named_in_one_sentence(tmp_path, content, kind):
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(content)
    for read in (read_manifest, read_manifest_leniently):
        with pytest.raises(ValueError, match=rf"manifest\.jsonl must be .* in UTF-8, but is {kind}: convert it$"):
            read(path)


@pytest.mark.parametrize("first", ["# my clips", "null", '"text": "torn"}', "{"])
def test_a_bad_first_line_is_a_mistake_as_any_other(tmp_path, first):
    clips, [mistake] = read_manifest_leniently(write(tmp_path, first, json.dumps(LINE)))
    assert len(clips) == 1
    assert "manifest.jsonl, line 1: a line must be one JSON object" in mistake


def test_lines_behind_a_crash_do_not_make_a_manifest_binary(tmp_path):
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + bytes(512))
    with pytest.raises(ValueError, match="line 2"):
        read_manifest(path)


def test_the_title_of_a_clip_is_one_line(tmp_path):
    assert Clip(tmp_path / "a\nb é.wav", 1.0, "").title == f"{tmp_path}/a\\nb é.wav"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "does not parse"),
        ("[1]", "found list"),
        (
            json.dumps({"duration": 1.0, "text": ""}),
            "the path of a sound file, found None",
        ),
        (json.dumps(LINE | {"duration": 0}), "a positive number of seconds, at most 1000000, found 0"),
        (json.dumps(LINE | {"duration": True}), "found True"),
        (json.dumps(LINE | {"offset": -1}), "of seconds into the file, at most 1000000, found -1"),
        (json.dumps(LINE | {"duration": float("nan")}), "found nan"),
        (json.dumps(LINE | {"duration": 1e308}), "found 1e+308"),
        (json.dumps(LINE | {"offset": 1e305}), "found 1e+305"),
        (json.dumps(LINE | {"audio_filepath": "a\0b.wav"}), "the path of a sound file, found 'a\\x00b.wav'"),
        (json.dumps(LINE | {"speaker": "\ud83d"}), "half of a pair, '\\ud83d'"),
        (json.dumps(LINE | {"text": None}), "a string (empty without one), found None"),
        (json.dumps(LINE | {"duration": 10**400}), "found 1000"),
        ('{"text": "a", "text": "b"}', "does not parse: a key must come once, but 'text' does not"),
        ('{"take": ' + "1" * 5000 + "}", "does not parse: Exceeds the limit"),
        ('{"a":' * 100_000, "does not parse: maximum recursion depth exceeded"),
        (json.dumps(LINE | {"offset": False}), "found False"),
        *[
            pytest.param(json.dumps(LINE | {field: ["a" * 5000]}), "found ['aaa", id=f"long {field}")
            for field in ("audio_filepath", "duration", "offset", "text")
        ],
        pytest.param(f'{{"{"k" * 5000}": 1, "{"k" * 5000}": 2}}', "must come once, but 'kkk", id="long key"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_and_by_perf_alike(tmp_path, line, found):
    path = write(tmp_path, json.dumps(LINE), line)
    with pytest.raises(ValueError, match="line 2") as error:
        read_manifest(path)
    assert str(path) in str(error.value)
    assert found in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 400
    with pytest.raises(ValueError, match="line 2") as error_in_perf:
        read_in_perf(path, with_texts=True)
    assert str(error_in_perf.value) == str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(LINE | {"text": " go\tso  far\u00a0on\n", "duration": 2}),
        json.dumps(LINE | {"text": "", "offset": 0, "speaker": None}),
        json.dumps(LINE | {"audio_filepath": "~/b.ogg", "text": "a\u2028b"}, ensure_ascii=False),
        json.dumps(LINE | {"audio_filepath": "~nobody/b.ogg", "text": "\U0001d11e"}) + "\r",
        "\ufeff" + json.dumps(LINE | {"audio_filepath": "/data/b.ogg"}),
    ],
)
def test_a_line_is_the_same_clip_to_perf(tmp_path, line):
    path = write(tmp_path, line)
    [clip], [utterance] = read_manifest(path), read_in_perf(path, with_texts=True)
    mine = (clip.audio_filepath, clip.duration, clip.text)
    assert (utterance.audio_filepath, utterance.duration_s, utterance.text) == mine


def test_a_line_that_is_not_utf_8_is_named_and_a_byte_order_mark_is_none(tmp_path):
    path = tmp_path / "manifest.jsonl"
    good = json.dumps(LINE | {"text": "é"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + good.encode() + b"\r\n" + good.encode("latin-1") + b"\n")
    found = r"manifest\.jsonl, line 2: a line must be one JSON object.*; convert the file to UTF-8$"
    with pytest.raises(ValueError, match=found):
        read_manifest(path)
    clips, mistakes = read_manifest_leniently(path)
    assert [clip.text for clip in clips] == ["é"]
    assert len(mistakes) == 1
    path.write_bytes(json.dumps(LINE | {"text": "?"}).encode().replace(b"?", b"\xed\xa0\xbd"))
    with pytest.raises(ValueError, match="half of a pair"):
        read_manifest(path)
