import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_perf.cuts import cut_equal, write_files, write_pcm

MANIFEST = Path(__file__).parents[2] / "demo/clips/manifest.jsonl"


@pytest.mark.parametrize("file_format", ["flac", "wav"])
def test_clips_have_the_exact_length_and_differ(file_format):
    cuts = cut_equal(MANIFEST, 1.25, 16, file_format)
    assert {len(cut.samples) for cut in cuts} == {20_000}
    assert len({cut.samples.tobytes() for cut in cuts}) == 16
    assert min(np.abs(cut.samples).max() for cut in cuts) > 0.05  # speech, not silence


def test_file_holds_the_same_samples():
    (cut,) = cut_equal(MANIFEST, 1.0, 1, "flac")
    samples, rate = soundfile.read(io.BytesIO(cut.file), dtype="float32")
    assert rate == 16_000
    np.testing.assert_array_equal(samples, cut.samples)


def test_no_more_speech_is_read_than_is_cut(tmp_path):
    rows = [json.loads(line) | {"audio_filepath": "nowhere.wav"} for line in MANIFEST.read_text().splitlines()]
    rows[0]["audio_filepath"] = str(MANIFEST.with_name("letter.wav"))
    (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(cut_equal(tmp_path / "manifest.jsonl", 0.5, 2, "wav")) == 2


def test_clips_longer_than_the_speech_begin_again():
    cuts = cut_equal(MANIFEST, 40.0, 2, "flac")
    assert [len(cut.samples) for cut in cuts] == [640_000] * 2


def test_input_files_are_as_perf_analyzer_reads_them(tmp_path):
    cuts = cut_equal(MANIFEST, 0.5, 2, "wav")
    write_pcm(tmp_path / "pcm.json", cuts)
    row = json.loads((tmp_path / "pcm.json").read_text())["data"][1]
    assert row["SIGNAL"]["shape"] == [8000]
    assert row["SIGNAL_LENGTH"] == {"content": [8000], "shape": [1]}
    decoded = np.frombuffer(base64.b64decode(row["SIGNAL"]["content"]["b64"]), np.float32)
    np.testing.assert_array_equal(decoded, cuts[1].samples)

    write_files(tmp_path / "files.json", cuts, ["one", "two"])
    content = json.loads((tmp_path / "files.json").read_text())
    assert base64.b64decode(content["data"][0]["AUDIO"]["content"]["b64"]) == cuts[0].file
    assert content["validation_data"][1]["TRANSCRIPT"] == {"content": ["two"], "shape": [1]}


def test_a_disk_without_room_is_named_with_the_file(room, tmp_path):
    cuts = cut_equal(MANIFEST, 0.5, 2, "wav")
    with room(1000):
        for write in (lambda path: write_pcm(path, cuts), lambda path: write_files(path, cuts, None)):
            with pytest.raises(OSError, match=f"{tmp_path}/scratch.json could not be written"):
                write(tmp_path / "scratch.json")
