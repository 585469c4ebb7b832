import json
from pathlib import Path

import pytest
from carnelian_perf.manifest import Utterance, read_manifest


def write(path: Path, **row: object) -> Path:
    path.write_text(json.dumps({"audio_filepath": "a.wav", "duration": 1, "text": "one"} | row) + "\n")
    return path


def test_paths_are_relative_to_the_manifest_or_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for audio, path in (("a.wav", "a.wav"), ("~/a.wav", "home/a.wav"), ("/a.wav", "/a.wav")):
        (found,) = read_manifest(write(tmp_path / "m.jsonl", audio_filepath=audio, source="b"), with_texts=True)
        assert found == Utterance(tmp_path / path, 1.0, "one", "b")


def test_a_part_of_a_file_is_refused(tmp_path):
    read_manifest(write(tmp_path / "m.jsonl", offset=0), with_texts=True)
    with pytest.raises(ValueError, match=r"m\.jsonl, line 1: a clip must be a whole file, but begins 2\.5 s into one"):
        read_manifest(write(tmp_path / "m.jsonl", offset=2.5), with_texts=True)
