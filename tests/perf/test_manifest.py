import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_perf.manifest import Utterance, read_manifest


def write(path: Path, **row: object) -> Path:
    path.write_text(json.dumps({"audio_filepath": "a.wav", "duration": 1, "text": "one"} | row) + "\n")
    return path


def test_paths_are_relative_to_the_manifest_or_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    named = {"a.wav": "a.wav", "~/a.wav": "home/a.wav", "/a.wav": "/a.wav", "~nobody/a.wav": "~nobody/a.wav"}
    for audio, path in named.items():
        (found,) = read_manifest(write(tmp_path / "m.jsonl", audio_filepath=audio, source="b"), with_texts=True)
        assert found == Utterance(tmp_path / path, 1.0, "one", "b")


def test_sources_are_words_or_none(tmp_path):
    for source, words in (("", ""), (0, "0"), (False, "False"), (None, None)):
        (found,) = read_manifest(write(tmp_path / "m.jsonl", source=source), with_texts=True)
        assert found.source == words


def test_a_line_ends_at_its_end_and_may_begin_with_a_mark(tmp_path):
    row = '{"audio_filepath": "a.wav", "duration": 1, "text": "one\u2028two"}'
    (tmp_path / "m.jsonl").write_bytes(f"\ufeff{row}\r\n{row}\n".encode())
    assert [found.text for found in read_manifest(tmp_path / "m.jsonl", with_texts=True)] == ["one\u2028two"] * 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"audio_filepath": "a.wav", "duration": 1, "text": null}', "`text` must be the clip's .* found None"),
        (b'{"audio_filepath": "a.wav", "duration": NaN, "text": "one"}', "`duration` must be a positive .* found nan"),
        (b'{"audio_filepath": "a.wav", "duration": true, "text": "one"}', "`duration` must be .* found True"),
        (b'{"audio_filepath": 1, "duration": 1, "text": "one"}', "`audio_filepath` must be .* found 1"),
        ('{"audio_filepath": "ä.wav", "duration": 1}'.encode("latin-1"), "does not parse: 'utf-8' codec"),
    ],
)
def test_a_line_that_is_no_clip_is_named(tmp_path, line, words):
    path = write(tmp_path / "m.jsonl")
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match=rf"m\.jsonl, line 2: .*{words}"):
        read_manifest(path, with_texts=True)


def test_a_part_of_a_file_is_refused(tmp_path):
    path = write(tmp_path / "m.jsonl", offset=0)
    (clip,) = read_manifest(path, with_texts=True)  # whose file is not there
    soundfile.write(clip.audio_filepath, np.zeros(round(clip.duration_s * 16_000)), 16_000)
    assert read_manifest(path, with_texts=True) == [clip]
    soundfile.write(clip.audio_filepath, np.zeros(round((clip.duration_s + 1) * 16_000)), 16_000)
    with pytest.raises(ValueError, match=r"line 1: a clip must be a whole file, but is 1 s that begin 0 s into one"):
        read_manifest(path, with_texts=True)
    with pytest.raises(ValueError, match=r"but is .* begin 2\.5 s into one"):
        read_manifest(write(tmp_path / "m.jsonl", offset=2.5), with_texts=True)


def test_without_soundfile_a_manifest_is_read(tmp_path, monkeypatch):
    """As by `accuracy`, which needs no extra."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = write(tmp_path / "m.jsonl", offset=0)
    assert len(read_manifest(path, with_texts=True)) == 1
