import json
import os

import numpy as np
import pytest
import soundfile
import yaml
from carnelian_training.cli import main
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data import validate
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from nvidia.dali import pipeline_def


@pytest.fixture
def manifest(bad_clips, tmp_path):
    """Every kind of bad clip and line, and one good clip among them."""
    noise = np.random.default_rng(1).standard_normal(16000).astype(np.float32) * 0.1
    soundfile.write(tmp_path / "good.flac", noise, 16000)
    soundfile.write(tmp_path / "telephone.wav", noise, 8000)
    soundfile.write(tmp_path / "music.wav", np.tile(noise, 20), 16000)
    clips = [
        *bad_clips.values(),
        Clip(tmp_path / "good.flac", 1.0, "a clip"),
        Clip(tmp_path / "telephone.wav", 2.0, "a clip"),
        Clip(tmp_path / "music.wav", 20.0, "la la"),
        Clip(tmp_path / "good.flac", 0.5, "né", offset=0.25),
        Clip(tmp_path / "good.flac", 0.5, "behind", offset=7.5),
    ]
    path = tmp_path / "mixed.jsonl"
    write_manifest(path, clips)
    with path.open("a") as file:
        file.write('{"audio_filepath": "x.wav"}\n')
    return path


def test_each_clip_is_reported_with_what_was_found(manifest, call):
    status, out, _ = call(main, "validate", manifest)
    assert status == 1
    expected = {
        "missing.wav": "No such file",
        "text.wav": "Format not recognised",
        "pipe.wav": "must be a regular file",
        "truncated.wav": "samples: the file is damaged or cut short",
        "empty.wav": "no samples",
        "silent.wav": "silent: root mean square 0.0e+00",
        "offset.wav": "silent: root mean square 0.0e+00 of full scale, a constant offset apart",
        "nan.wav": "samples that are no finite numbers",
        "longer.wav": "lasts 2.00 s, but its manifest says 1.00 s; a stretch of a longer file has an `offset`, be it 0",
        "dense.wav": "longer than CTC can align: it needs 223 output frames, the clip has 87",
        "segment.wav at 1 s": "lasts 1.00 s, but its manifest says 2.00 s",
        "telephone.wav": "recorded at 8000 Hz, below 16000 Hz",
        "music.wav": "20 s, outside 0.2 to 16.7 s",
        "good.flac at 0.25 s": "characters outside the labels: 'é'",
        "good.flac at 7.5 s": "begins 7.5 s into a file that lasts 1.00 s",
        "line 19": "`duration` must be a positive number of seconds, at most 1000000, found None",
    }
    lines = out.splitlines()
    for clip, words in expected.items():
        assert any(f"{clip}: " in line and words in line for line in lines), (clip, words)
    assert not any("good.flac:" in line for line in lines)
    assert "1 clips without a defect" in lines[-2]
    assert "5 unreadable" in lines[-2]
    assert lines[-1] == f"{manifest} was judged by the English labels: a YAML file that names it brings its own"


def test_a_word_at_the_end_of_a_long_pause_is_heard(tmp_path, call):
    sound = np.zeros(16 * 16_000, np.float32)
    sound[-4800:-480] = np.random.default_rng(0).normal(0, 0.1, 4320)
    soundfile.write(tmp_path / "yes.wav", sound, 16_000)
    write_manifest(tmp_path / "late.jsonl", [Clip(tmp_path / "yes.wav", 16.0, "yes")])
    status, out, _ = call(main, "validate", tmp_path / "late.jsonl")
    assert status == 0, out


def test_the_rate_of_a_file_behind_a_tag_is_seen(tmp_path, call):
    """libsndfile finds no Ogg there, and ended the command."""
    soundfile.write(tmp_path / "call.ogg", np.random.default_rng(0).normal(0, 0.1, 16_000), 8000, subtype="OPUS")
    (tmp_path / "call.ogg").write_bytes(b"ID3\4" + bytes(6) + (tmp_path / "call.ogg").read_bytes())
    write_manifest(tmp_path / "calls.jsonl", [Clip(tmp_path / "call.ogg", 2.0, "yes")])
    status, out, _ = call(main, "validate", tmp_path / "calls.jsonl")
    assert status == 1
    assert "call.ogg: recorded at 8000 Hz, below 16000 Hz" in out


def test_the_cleaned_manifest_holds_what_is_left_and_passes(manifest, call):
    call(main, "validate", manifest, "--write", "--min-rate", "8000")
    clean = manifest.with_name("mixed.clean.jsonl")
    assert [clip.audio_filepath.name for clip in read_manifest(clean)] == ["good.flac", "telephone.wav"]
    status, out, _ = call(main, "validate", clean, "--min-rate", "8000")
    assert status == 0
    assert "defects: none" in out


def test_a_configuration_brings_manifests_labels_and_limits(manifest, tiny_config, tmp_path, call):
    tree = config_to_dict(tiny_config)
    tree["labels"] = [*tree["labels"], "é"]
    tree["data"] |= {"train": [{"path": str(manifest)}], "dev": str(manifest), "max_duration_s": 25}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    status, out, _ = call(main, "validate", tmp_path / "own.yaml")
    assert status == 1
    assert "outside the labels" not in out
    assert "judged by" not in out
    assert "music.wav" not in out
    assert out.count("nan.wav") == 2  # in training and dev
    assert out.count("dense.wav") == 1  # evaluation aligns nothing


def test_nothing_to_look_at_is_no_success(tiny_config, tmp_path, call):
    (tmp_path / "none.jsonl").write_text("\n")
    status, out, _ = call(main, "validate", tmp_path / "none.jsonl")
    assert status == 1
    assert "none.jsonl: no clips at all" in out
    tree = config_to_dict(tiny_config)
    tree["data"] = {}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    status, _, err = call(main, "validate", tmp_path / "own.yaml")
    assert status == 1
    assert "own.yaml must name manifests" in err


def test_what_fit_is_given_can_be_validated(manifest, tiny_config, tmp_path, call):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config_to_dict(tiny_config) | {"data": {}}))
    given = ("--set", f"data.train=[{{path: {manifest}}}]", "--set", "labels=[x]")
    status, out, err = call(main, "validate", tmp_path / "own.yaml", *given)
    assert (status, f"{manifest}: 0 clips without a defect" in out) == (1, True), out + err
    status, _, err = call(main, "validate", manifest, *given)
    assert (status, "--set must come with a YAML file" in err) == (1, True), err


def test_a_sound_manifest_passes(tmp_path, call):
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).standard_normal(16000) * 0.1, 16000)
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio_filepath": "a.wav", "duration": 1.0, "text": "a"}))
    status, out, _ = call(main, "validate", tmp_path / "m.jsonl")
    assert status == 0
    assert "1 clips without a defect" in out


def test_as_many_threads_decode_as_the_process_has_cores(tmp_path, call, monkeypatch):
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).standard_normal(16000) * 0.1, 16000)
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "a.wav", 1.0, "a")])
    built = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6})
    monkeypatch.setattr(validate, "pipeline_def", lambda **options: built.append(options) or pipeline_def(**options))
    assert call(main, "validate", tmp_path / "m.jsonl")[0] == 0
    assert [options["num_threads"] for options in built] == [3]


def test_a_sound_that_comes_again_is_named_and_left_out(tmp_path, call):
    noise = np.random.default_rng(0).standard_normal(16000) * 0.1
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / name, noise, 16000)
    clips = [
        Clip(tmp_path / "a.wav", 1.0, "first"),
        Clip(tmp_path / "b.wav", 0.5, "part", offset=0.25),
        Clip(tmp_path / "b.wav", 0.5, "other part", offset=0.5),
        Clip(tmp_path / "b.wav", 0.5, "part", offset=0.25),
        Clip(tmp_path / "." / ".." / tmp_path.name / "a.wav", 1.01, "second"),
    ]
    write_manifest(tmp_path / "m.jsonl", clips)
    status, out, _ = call(main, "validate", tmp_path / "m.jsonl", "--write")
    assert status == 1
    assert "b.wav at 0.25 s: in an earlier line, too\n" in out
    assert "a.wav: in an earlier line, too, with another text\n" in out
    assert "defects: 2 repeated" in out
    assert read_manifest(tmp_path / "m.clean.jsonl") == clips[:3]


def test_a_line_behind_a_wrong_one_for_the_same_sound_is_kept(tmp_path, call):
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).standard_normal(16000) * 0.1, 16000)
    clips = [Clip(tmp_path / "a.wav", *line) for line in [(99.0, "too long"), (1.0, "so [noise] okay"), (1.0, "okay")]]
    write_manifest(tmp_path / "m.jsonl", clips)
    assert "repeated" not in call(main, "validate", tmp_path / "m.jsonl", "--write")[1]
    assert read_manifest(tmp_path / "m.clean.jsonl") == clips[2:]


def test_a_file_that_cannot_be_read_is_not_repeated(tmp_path, call):
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "none.wav", 1.0, "a")] * 2)
    assert "defects: 2 unreadable\n" in call(main, "validate", tmp_path / "m.jsonl")[1]


def test_what_may_be_meant_so_is_counted_alone(tiny_config, tmp_path, call):
    noise = np.random.default_rng(0).standard_normal((16000, 2)) * 0.1
    for name in ("a.wav", "b.wav", "c.wav"):
        soundfile.write(tmp_path / name, noise[:, : 1 if name == "a.wav" else 2], 16000)
    clips = [Clip(tmp_path / name, 1.0, "a") for name in ("a.wav", "b.wav", "c.wav")]
    write_manifest(tmp_path / "train.jsonl", clips[1:])
    write_manifest(tmp_path / "dev.jsonl", [clips[0], Clip(tmp_path / "b.wav", 1.01, "b")])
    tree = config_to_dict(tiny_config)
    tree["data"] |= {"train": [{"path": str(tmp_path / "train.jsonl")}], "dev": str(tmp_path / "dev.jsonl")}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    status, out, _ = call(main, "validate", tmp_path / "own.yaml")
    assert status == 0, out
    assert "train.jsonl: 2 clips of several channels, which are mixed\n" in out
    assert "dev.jsonl: 1 clips of several channels, which are mixed\n" in out
    assert "dev.jsonl: 1 clips in the manifests of training, too\n" in out
    assert "train.jsonl: 2 clips in the manifests" not in out
