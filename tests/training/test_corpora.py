import dataclasses
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from carnelian_training.cli import main
from carnelian_training.corpora.perturb import perturb
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.data.plan import Item
from carnelian_training.features import FeatureSettings

NOISE = np.random.default_rng(0).standard_normal(48000).astype(np.float32) * 0.1


@pytest.fixture
def lhotse_recordings(tmp_path):
    """What Lhotse itself writes about a long file with two utterances and a short one."""
    lhotse = pytest.importorskip("lhotse")
    soundfile.write(tmp_path / "long.wav", NOISE, 16000)
    soundfile.write(tmp_path / "short.flac", NOISE[:16000], 16000)
    recordings = [lhotse.Recording.from_file(tmp_path / name) for name in ("long.wav", "short.flac")]
    segments = [
        lhotse.SupervisionSegment("l1", "long", 0.25, 1.0, text="Eins", speaker="anna", language="German"),
        lhotse.SupervisionSegment("l2", "long", 1.5, 1.25, text="Zwei", speaker="otto"),
        lhotse.SupervisionSegment("s1", "short", 0.0, 1.0, text="Drei"),
    ]
    recording_set = lhotse.RecordingSet.from_recordings(recordings)
    supervision_set = lhotse.SupervisionSet.from_segments(segments)
    recording_set.to_file(tmp_path / "recordings.jsonl.gz")
    supervision_set.to_file(tmp_path / "supervisions.jsonl.gz")
    lhotse.CutSet.from_manifests(recording_set, supervision_set).to_file(tmp_path / "cuts.jsonl.gz")
    return tmp_path


@pytest.mark.parametrize("from_cuts", [True, False])
def test_lhotses_manifests_become_ours(lhotse_recordings, call, from_cuts):
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    separate = ("--recordings", folder / "recordings.jsonl.gz", "--supervisions", folder / "supervisions.jsonl.gz")
    sources = ("--cuts", folder / "cuts.jsonl.gz") if from_cuts else separate
    assert call(main, "convert", target, *sources, "--lower")[0] == 0
    clips = read_manifest(target)
    assert clips == [
        Clip(folder / "long.wav", 1.0, "eins", offset=0.25),
        Clip(folder / "long.wav", 1.25, "zwei", offset=1.5),
        Clip(folder / "short.flac", 1.0, "drei"),
    ]
    assert clips[0].extra == {"id": "l1", "speaker": "anna", "language": "German"}
    (batch,) = load([[Item(clip) for clip in clips]], FeatureSettings(), 1)
    assert batch.lengths.tolist() == [101, 126, 101]


def test_punctuation_may_be_taken_out_of_transcripts(lhotse_recordings, call):
    """Common Voice ends nearly each sentence with a stop, which no labels hold: all of it would be left out."""
    lhotse = pytest.importorskip("lhotse")
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    said = lhotse.SupervisionSegment("s", "short", 0.0, 1.0, text="„Nein“ – ja, du's.")
    lhotse.SupervisionSet.from_segments([said]).to_file(folder / "said.jsonl")
    sources = ("--recordings", folder / "recordings.jsonl.gz", "--supervisions", folder / "said.jsonl")
    assert call(main, "convert", target, *sources, "--lower", "--remove", ".,„“–")[0] == 0
    assert [clip.text for clip in read_manifest(target)] == ["nein ja du's"]


@pytest.mark.parametrize(
    ("text", "labels", "written"),
    [
        ("„Nein“ – ja, du’s.", " 'abcdefghijklmnopqrstuvwxyzäöüß", "nein ja du's"),
        ("IŞIK, İstanbul!", " abcçdefgğhıijklmnoöprsştuüvyz", "ışık istanbul"),
        ("Um 3 Uhr.", " abcdefghijklmnopqrstuvwxyz", "Um 3 Uhr."),
    ],
)
def test_transcripts_may_be_written_in_the_labels(lhotse_recordings, call, text, labels, written):
    lhotse = pytest.importorskip("lhotse")
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    lhotse.SupervisionSet.from_segments([lhotse.SupervisionSegment("s", "short", 0.0, 1.0, text=text)]).to_file(
        folder / "said.jsonl"
    )
    sources = ("--recordings", folder / "recordings.jsonl.gz", "--supervisions", folder / "said.jsonl")
    assert call(main, "convert", target, *sources, "--labels", labels)[0] == 0
    assert [clip.text for clip in read_manifest(target)] == [written]
    assert call(main, "convert", target, *sources, "--labels", labels, "--lower")[0] == 2


def test_what_is_said_in_two_windows_is_one_clip(lhotse_recordings, call):
    lhotse = pytest.importorskip("lhotse")
    windows, target = lhotse_recordings / "windows.jsonl", lhotse_recordings / "ours.jsonl"
    lhotse.CutSet.from_file(lhotse_recordings / "cuts.jsonl.gz").cut_into_windows(1.0).to_file(windows)
    assert call(main, "convert", target, "--cuts", windows)[0] == 0
    assert sorted(clip.text for clip in read_manifest(target)) == ["Drei", "Eins", "Zwei"]


def test_a_manifest_of_nothing_is_refused(tmp_path, call):
    (tmp_path / "cuts.yaml").write_text("[]")
    status, _, err = call(main, "convert", tmp_path / "a.jsonl", "--cuts", tmp_path / "cuts.yaml")
    assert (status, f"{tmp_path / 'cuts.yaml'} must hold" in err) == (1, True)
    assert not (tmp_path / "a.jsonl").exists()


def test_what_lhotse_would_have_to_compute_is_refused(lhotse_recordings, call):
    lhotse = pytest.importorskip("lhotse")
    fast, target = lhotse_recordings / "fast.jsonl.gz", lhotse_recordings / "x.jsonl"
    lhotse.CutSet.from_file(lhotse_recordings / "cuts.jsonl.gz").perturb_speed(1.1).to_file(fast)
    status, _, err = call(main, "convert", target, "--cuts", fast)
    assert status == 1
    assert "must be a file's own sound" in err
    assert not target.exists()
    assert call(main, "convert", target)[0] == 2
    (lhotse_recordings / "other.jsonl").write_text('{"audio_filepath": "a.wav", "duration": 1, "text": "a"}')
    (lhotse_recordings / "broken.yaml").write_text("a: [")
    (lhotse_recordings / "broken.jsonl").write_text("{a")
    recordings, supervisions = (sorted(lhotse_recordings.glob(f"{kind}*"))[0] for kind in ("rec", "sup"))
    for given, named in (
        (["--cuts", lhotse_recordings / "other.jsonl"], "other.jsonl must be a CutSet of Lhotse, but"),
        (["--cuts", lhotse_recordings / "missing.jsonl"], "missing.jsonl must be a CutSet of Lhotse, but"),
        (["--cuts", lhotse_recordings / "broken.yaml"], "broken.yaml must be a CutSet of Lhotse, but cannot be read"),
        (["--cuts", lhotse_recordings / "broken.jsonl"], "broken.jsonl must be a CutSet of Lhotse, but cannot be read"),
        (["--recordings", supervisions, "--supervisions", recordings], "must be a RecordingSet of Lhotse, but has a"),
    ):
        status, _, err = call(main, "convert", target, *given)
        assert (status, named in err, "Traceback" in err) == (1, True, False), err
    bare = lhotse_recordings / "bare.jsonl"
    cuts = lhotse.CutSet.from_file(lhotse_recordings / "cuts.jsonl.gz").to_eager()
    lhotse.CutSet.from_cuts(dataclasses.replace(cut, recording=None) for cut in cuts).to_file(bare)
    status, _, err = call(main, "convert", target, "--cuts", bare)
    assert (status, "must have its recording, but has features alone" in err) == (1, True), err
    (lhotse_recordings / "empty.jsonl").write_text("")
    status, _, err = call(main, "convert", target, "--cuts", lhotse_recordings / "empty.jsonl")
    assert (status, "empty.jsonl must be a CutSet of Lhotse, but is empty" in err) == (1, True)


def test_calls_of_two_channels_in_kaldis_folders_are_refused(tmp_path, call):
    """Lhotse claims one channel of each, and both speakers would be mixed against the transcript of one."""
    kaldi = pytest.importorskip("lhotse.kaldi")
    soundfile.write(tmp_path / "call.wav", np.stack([NOISE, -NOISE], axis=1), 8000)
    lines = {"wav.scp": f"call {tmp_path}/call.wav", "segments": "u call 0.0 2.0", "text": "u hello", "utt2spk": "u s"}
    for name, line in lines.items():
        (tmp_path / name).write_text(line + "\n")
    recordings, supervisions, _ = kaldi.load_kaldi_data_dir(tmp_path, 8000)
    recordings.to_file(tmp_path / "recordings.jsonl")
    supervisions.to_file(tmp_path / "supervisions.jsonl")
    sources = ("--recordings", tmp_path / "recordings.jsonl", "--supervisions", tmp_path / "supervisions.jsonl")
    status, _, err = call(main, "convert", tmp_path / "ours.jsonl", *sources)
    assert (status, f"{tmp_path}/call.wav has 2: split it first, as by `sox" in err) == (1, True), err


@pytest.fixture
def convert_cut(tmp_path, call):
    """Return a function that converts cuts of half a second of a.wav, each with a change in its JSON."""
    pytest.importorskip("lhotse")
    soundfile.write(tmp_path / "a.wav", NOISE[:16000], 16000)
    source = {"type": "file", "channels": [0], "source": str(tmp_path / "a.wav")}

    def convert(*changes):
        cuts = []
        for number, change in enumerate(changes):
            recording = {"id": "r", "sources": [source], "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}
            said = {"id": "s", "recording_id": "r", "start": 0.25, "duration": 0.5, "channel": 0, "text": "a"}
            cut = {"id": f"c{number}", "type": "MonoCut", "start": 0.0, "duration": 1.0, "channel": 0}
            for place, value in change.items():
                where, name = place.split(".")
                given = {"cut": cut, "said": said, "recording": recording}[where]
                given[name] = [source | {"source": value}] if name == "source" else value
            cuts.append(
                cut | {"supervisions": [said], "recording": recording | {"sources": recording.pop("source", [source])}}
            )
        (tmp_path / "cuts.jsonl").write_text("\n".join(map(json.dumps, cuts)))
        (tmp_path / "ours.jsonl").write_text("old")
        return call(main, "convert", tmp_path / "ours.jsonl", "--cuts", tmp_path / "cuts.jsonl", "--lower")

    return convert


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        *(
            ("said.duration", value, f"s: `duration` must be a positive number of seconds, .*, found {value}$")
            for value in (0, -1)
        ),
        *(
            (place, value, rf"{item}: its `{name}` must be a number of seconds, at most 1000000, found {shown}$")
            for place, item, name in (
                ("said.duration", "s", "duration"),
                ("said.start", "s", "start"),
                ("cut.start", "c0", "start"),
                ("recording.duration", "the recording of c0", "duration"),
            )
            for value, shown in (
                (math.nan, "nan"),
                (math.inf, "inf"),
                (1e300, r"1e\+300"),
                (None, "None"),
                ("0", "'0'"),
            )
        ),
        *(("said.text", value, r"s: `text` must be the clip's tr.*, found [05\[]") for value in (5, ["a"], 0)),
        *(
            ("recording.source", value, "s: `audio_filepath` must be the path of a sound file, found ")
            for value in (5, "", "a\0b", "http://x/y.flac")
        ),
        ("recording.source", "/a\udc80.wav", r"s: a line must be Unicode text, but has half of a pair"),
        ("said.text", "a\ud800", r"s: a line must be Unicode text, but has half of a pair"),
        ("said.id", [1], r"\[1\]: its `id` must be text or a number, found \[1\]$"),
        ("recording.id", [1], r"the recording of c0: its `id` must be text or a number, found \[1\]$"),
        ("recording.channel_ids", 1, "the recording of c0: its `channel_ids` must be a list, found 1$"),
    ],
    ids=repr,
)
def test_what_our_manifests_cannot_hold_is_refused_with_its_supervision(convert_cut, tmp_path, place, value, found):
    """Manifests were written that training refused, and Python's own errors named no file."""
    status, _, err = convert_cut({place: value})
    assert status == 1
    assert re.search(rf"cuts\.jsonl: {found}", err.replace("\n", " ").strip()), err
    assert (tmp_path / "ours.jsonl").read_text() == "old"


def test_a_tilde_in_lhotses_source_is_the_home_folder(convert_cut, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert convert_cut({"recording.source": "~/a.wav"})[0] == 0
    assert [clip.audio_filepath for clip in read_manifest(tmp_path / "ours.jsonl")] == [tmp_path / "a.wav"]


def test_cuts_of_one_id_in_two_files_are_two_clips(convert_cut, tmp_path):
    """One was taken for the other in another window."""
    soundfile.write(tmp_path / "b.wav", NOISE[:16000], 16000)
    assert convert_cut({}, {"recording.source": str(tmp_path / "b.wav")}, {"said.text": "b"}, {})[0] == 0
    found = [(clip.audio_filepath.name, clip.text) for clip in read_manifest(tmp_path / "ours.jsonl")]
    assert found == [("a.wav", "a"), ("b.wav", "a"), ("a.wav", "b")]


def test_two_recordings_of_one_id_are_refused(lhotse_recordings, call):
    """Transcripts of the first got the sound of the last."""
    lhotse = pytest.importorskip("lhotse")
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    one, other = (lhotse.Recording.from_file(folder / name, "long") for name in ("long.wav", "short.flac"))
    short = lhotse.Recording.from_file(folder / "short.flac")
    sources = ("--recordings", folder / "twice.jsonl", "--supervisions", folder / "supervisions.jsonl.gz")
    lhotse.RecordingSet.from_recordings([one, short, other]).to_file(folder / "twice.jsonl")
    status, _, err = call(main, "convert", target, *sources)
    assert (status, target.exists()) == (1, False)
    assert "twice.jsonl must have one recording of an id, but has two of long: if" in " ".join(err.split())
    lhotse.RecordingSet.from_recordings([one, short, one]).to_file(folder / "twice.jsonl")
    assert call(main, "convert", target, *sources)[0] == 0
    assert len(read_manifest(target)) == 3


def test_a_manifest_of_lhotses_that_is_nested_too_deep_is_named(lhotse_recordings, call):
    (lhotse_recordings / "deep.jsonl").write_text('{"a":' * 100_000)
    status, _, err = call(main, "convert", lhotse_recordings / "x.jsonl", "--cuts", lhotse_recordings / "deep.jsonl")
    assert (status, "deep.jsonl must be a CutSet of Lhotse, but cannot be read: maximum" in err) == (1, True), err


@pytest.mark.parametrize(("recording", "offset"), [("long", 0.0), ("short", None)])
def test_a_rounding_error_is_no_beginning(lhotse_recordings, call, recording, offset):
    lhotse = pytest.importorskip("lhotse")
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    said = lhotse.SupervisionSegment("s", recording, -1e-7, 1.0, text="a")
    lhotse.SupervisionSet.from_segments([said]).to_file(folder / "said.jsonl")
    sources = ("--recordings", folder / "recordings.jsonl.gz", "--supervisions", folder / "said.jsonl")
    assert call(main, "convert", target, *sources)[0] == 0
    assert [clip.offset for clip in read_manifest(target)] == [offset]
    assert "-0.0" not in target.read_text()


def test_a_supervision_that_begins_before_its_recording_is_refused(lhotse_recordings, call):
    lhotse = pytest.importorskip("lhotse")
    folder, target = lhotse_recordings, lhotse_recordings / "ours.jsonl"
    early = lhotse.SupervisionSegment("early", "long", -1.0, 2.0, text="a")
    lhotse.SupervisionSet.from_segments([early]).to_file(folder / "early.jsonl")
    sources = ("--recordings", folder / "recordings.jsonl.gz", "--supervisions", folder / "early.jsonl")
    status, _, err = call(main, "convert", target, *sources)
    assert (status, "early must begin within its recording, but begins at -1 s" in err) == (1, True), err


def test_offline_perturbation_hears_of_an_mp3_segment_what_the_whole_file_has_there(tmp_path):
    time_s = np.arange(4 * 44100) / 44100
    bursts = np.random.default_rng(0).uniform(-0.5, 0.5, len(time_s)) * (np.sin(2 * np.pi * 3 * time_s) > 0.5)
    mp3, wav = tmp_path / "a.mp3", tmp_path / "a.wav"
    soundfile.write(mp3, bursts, 44100, bitrate_mode="VARIABLE", compression_level=0.9)
    soundfile.write(wav, *soundfile.read(mp3), subtype="FLOAT")
    segments = [Clip(path, 0.5, "a", offset=offset) for offset in (1.1, 1.2, 1.3, 1.4) for path in (mp3, wav)]
    write_manifest(tmp_path / "m.jsonl", segments)
    new = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.1]))[len(segments) :]
    heard = [soundfile.read(clip.audio_filepath)[0] for clip in new]
    np.testing.assert_allclose(heard[::2], heard[1::2], atol=2**-14)  # files of 16 bits


def test_offline_perturbation_writes_clips_at_other_speeds(tmp_path, monkeypatch):
    tone = np.sin(2 * np.pi * 1000 * np.arange(32000) / 16000).astype(np.float32) * 0.5
    soundfile.write(tmp_path / "tone.wav", tone, 16000)
    clips = [Clip(tmp_path / "tone.wav", 2.0, "a", {"speaker": "x"}), Clip(tmp_path / "tone.wav", 1.0, "b", offset=0.5)]
    write_manifest(tmp_path / "m.jsonl", clips)
    pools = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6})
    monkeypatch.setattr(
        "carnelian_training.corpora.perturb.ThreadPoolExecutor",
        lambda threads: pools.append(threads) or ThreadPoolExecutor(threads),
    )
    found = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.8, 1.25]))
    assert found[:2] == clips
    assert pools == [3]
    assert [(clip.text, clip.duration) for clip in found[2:]] == [("a", 2.5), ("b", 1.25), ("a", 1.6), ("b", 0.8)]
    assert found[4].extra == {"speaker": "x", "speed": 1.25}
    faster, rate = soundfile.read(found[4].audio_filepath)
    assert np.abs(np.fft.rfft(faster)).argmax() * rate / len(faster) == pytest.approx(1250)
    with pytest.raises(ValueError, match="not 1"):
        perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.0])
    with pytest.raises(ValueError, match=r"must differ, but are 0\.9, 1\.1, 0\.9"):
        perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.9, 1.1, 0.9])
    (tmp_path / "tone.wav").unlink()
    with pytest.raises(ValueError, match=r"tone\.wav cannot be read: .*No such file"):
        perturb(tmp_path / "m.jsonl", tmp_path / "other", [1.1])
    with pytest.raises(ValueError, match=r"must be another file than the source, .*out/manifest\.jsonl"):
        perturb(tmp_path / "out" / "manifest.jsonl", tmp_path / "out", [1.1])


def test_offline_perturbation_of_many_clips_has_few_in_memory(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "tone.wav", np.sin(np.arange(32000)) * 0.5, 16000)
    texts = list("abcde")
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "tone.wav", 2.0, text) for text in texts])
    waiting = []

    class Pool(ThreadPoolExecutor):
        def map(self, function, *arguments):
            waiting.append(len(arguments[0]))
            return super().map(function, *arguments)

    monkeypatch.setattr("carnelian_training.corpora.perturb.ThreadPoolExecutor", Pool)
    monkeypatch.setattr("carnelian_training.corpora.perturb.TASKS_AT_ONCE", 4)
    found = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.8, 1.25]))
    assert waiting == [4, 4, 2]
    assert [clip.text for clip in found] == texts * 3


def test_offline_perturbation_loses_no_speeds_of_an_earlier_run(tmp_path):
    soundfile.write(tmp_path / "a.wav", NOISE[:16000], 16000)
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "a.wav", 1.0, "a")])
    perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.9, 1.1])
    with pytest.raises(ValueError, match=r"jsonl would lose its clips of the speeds 0\.9, 1\.1: ask"):
        perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.2])
    assert not (tmp_path / "out" / "1.2").exists()
    (tmp_path / "a.wav").rename(tmp_path / "b.wav")
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "b.wav", 1.0, "a")])  # clips may be others
    partial = tmp_path / "out" / "1.1" / f".{'0a' * 8}.0000000-letter.flac"
    partial.write_bytes(b"half")  # of a run that was killed
    found = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.9, 1.1, 1.2]))
    assert not partial.exists()
    assert [clip.extra.get("speed") for clip in found] == [None, 0.9, 1.1, 1.2]


def test_offline_perturbation_overwrites_no_manifest_that_it_has_not_written(tmp_path):
    soundfile.write(tmp_path / "a.wav", NOISE[:16000], 16000)
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "a.wav", 1.0, "a")])
    made = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.1]))
    by_hand = Clip(tmp_path / "b.wav", 1.0, "b")
    for listed in ([by_hand], [*made, by_hand], [by_hand, *made]):
        write_manifest(tmp_path / "out" / "manifest.jsonl", listed)
        before = (tmp_path / "out" / "manifest.jsonl").read_text()
        with pytest.raises(
            ValueError, match=r"lose [12] clips that `perturb` has not .*, such as .*b\.wav: choose ano"
        ):
            perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.1])
        assert (tmp_path / "out" / "manifest.jsonl").read_text() == before


def test_offline_perturbation_of_clips_with_a_speed_of_their_own_can_be_repeated(tmp_path):
    soundfile.write(tmp_path / "a.wav", NOISE[:16000], 16000)
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "a.wav", 1.0, "a", {"speed": 0.93})])  # synthesised
    first, again = (read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.1])) for _ in range(2))
    assert [clip.extra["speed"] for clip in again] == [0.93, 1.1]
    assert first == again


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (NOISE[:0], "no samples"),
        (NOISE[:16000], "lasts 1.00 s, but its manifest says 3.00 s"),
        (np.append(NOISE[1:], np.nan), "samples that are no finite numbers"),
    ],
)
def test_offline_perturbation_refuses_what_training_leaves_out(tmp_path, samples, words):
    soundfile.write(tmp_path / "bad.wav", samples, 16000, subtype="FLOAT")
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "bad.wav", 3.0, "a few words")])
    with pytest.raises(ValueError, match=rf"bad\.wav: {words}; `carnelian-train validate --write`"):
        perturb(tmp_path / "m.jsonl", tmp_path / "out", [0.9])
    assert not list(tmp_path.rglob("*.flac"))


def test_what_offline_perturbation_writes_of_a_segment_is_a_file_of_its_own(tmp_path):
    soundfile.write(tmp_path / "long.wav", NOISE[:32000], 16000)
    write_manifest(tmp_path / "m.jsonl", [Clip(tmp_path / "long.wav", 1.0, "a", offset=0.5)])
    old, new = read_manifest(perturb(tmp_path / "m.jsonl", tmp_path / "out", [1.25]))
    assert (old.offset, new.offset) == (0.5, None)
    assert soundfile.info(new.audio_filepath).duration == pytest.approx(new.duration)
