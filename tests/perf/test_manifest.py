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
