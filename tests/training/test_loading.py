import dataclasses
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from carnelian_training.checkpoint import build_model
from carnelian_training.data import audio, decoding
from carnelian_training.data.defects import silence_defect, sound_defect
from carnelian_training.data.loading import load
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.data.plan import Item
from carnelian_training.data.validate import check_clean
from carnelian_training.distributed import Process
from carnelian_training.features import FeatureSettings
from torch.nn import functional as F

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"


def test_an_empty_share_runs_through_network_and_loss(tiny_config):
    (empty,) = load([[]], FeatureSettings(), 1)
    assert empty.items == ()
    log_probs, lengths = build_model(tiny_config).eval()(empty.features, empty.lengths)
    targets, target_lengths = empty.targets(tiny_config.labels)
    loss = F.ctc_loss(log_probs.transpose(0, 1), targets, lengths, target_lengths, reduction="sum")
    loss.backward()
    assert loss == 0


def test_a_batch_equals_its_clips_alone():
    items = [Item(clip) for clip in read_manifest(CLIPS)]
    (batch,) = load([items], FeatureSettings(), 1)
    for i, alone in enumerate(load([[item] for item in items], FeatureSettings(), 1)):
        frames = int(alone.lengths[0])
        assert frames == pytest.approx(items[i].duration_s * 100, abs=2)
        assert batch.lengths[i] == frames
        torch.testing.assert_close(batch.features[i, :, :frames], alone.features[0, :, :frames])
        assert not batch.features[i, :, frames:].any()


def test_speed_shortens_a_clip():
    clip = read_manifest(CLIPS)[0]
    slow, fast = load([[Item(clip)], [Item(clip, 1.25)]], FeatureSettings(), 1)
    assert fast.lengths.item() == pytest.approx(slow.lengths.item() / 1.25, abs=2)


@pytest.mark.parametrize("speed", [1.0, 0.9])
def test_a_clip_that_lasts_a_little_longer_than_its_line_says_keeps_its_end(tmp_path, speed):
    noise = np.random.default_rng(0).standard_normal(32000) * 0.1
    soundfile.write(tmp_path / "a.wav", noise, 16000)
    whole, rounded = (
        batch.lengths.item()
        for batch in load([[Item(Clip(tmp_path / "a.wav", s, "a"), speed)] for s in (2.0, 1.9)], FeatureSettings(), 1)
    )
    assert rounded == whole


def test_training_leaves_out_exactly_the_bad_clips(bad_clips, tiny_config, caplog):
    good = read_manifest(CLIPS)
    mixed = [clip for pair in zip(bad_clips.values(), itertools.cycle(good), strict=False) for clip in pair]
    items = [Item(clip, 1.05) for clip in mixed]
    first, alone, second = load(
        [items, items[:1], [Item(clip) for clip in good]], FeatureSettings(), 1, training=tiny_config
    )
    (clean,) = load([[item for item in items if item.clip in good]], FeatureSettings(), 1)
    assert first.items == clean.items
    torch.testing.assert_close(first.features, clean.features)
    assert torch.equal(first.lengths, clean.lengths)
    reasons = {item.clip.audio_filepath.stem: reason for item, reason in first.skipped}
    assert reasons.keys() == bad_clips.keys()
    expected = {
        "missing": "No such file",
        "text": "Format not recognised",
        "pipe": "must be a regular file",
        "truncated": "Requested",
        "empty": "no samples",
        "silent": "silent: root mean square",
        "offset": "silent: root mean square",
        "nan": "no finite numbers",
        "infinite": "no finite numbers",
        "longer": "lasts 2.00 s, but its manifest says 1.00 s",
        "endless": "lasts 20.00 s, but its manifest says 1.00 s",
        "dense": "longer than CTC can align",
        "segment": "lasts 1.00 s, but its manifest says 2.00 s",
    }
    for name, words in expected.items():
        assert words in reasons[name]
        assert f"{bad_clips[name].title}: {reasons[name]}" in caplog.text
    assert alone.items == ()
    assert len(alone.skipped) == 1
    assert list(second.items) == [Item(clip) for clip in good]


def test_quiet_is_not_silent_and_rounded_is_not_wrong():
    assert [bool(silence_defect(10 ** (level_db / 20))) for level_db in (-85, -95)] == [False, True]
    clip = Clip(Path("a.wav"), 10.0, "a")  # 0.1 s and a hundredth
    for seconds, is_wrong in ((9.85, False), (10.15, False), (9.75, True), (10.25, True)):
        assert bool(sound_defect(clip, round(seconds * 16_000), True)) == is_wrong


def test_the_files_of_a_batch_are_read_at_once(monkeypatch):
    clips = read_manifest(CLIPS)[:2]
    both, encoded = threading.Barrier(2), decoding.encoded

    def read(clip):
        both.wait(timeout=60)
        return encoded(clip)

    monkeypatch.setattr(decoding, "encoded", read)
    (batch,) = load([[Item(clip) for clip in clips]], FeatureSettings(), 2)
    assert [item.clip for item in batch.items] == clips
    check_clean(clips, CLIPS, 2, Process(torch.device("cpu")))


@pytest.mark.parametrize("prefetch", [1, 4])
def test_batches_ahead_of_a_bad_clip_keep_their_order(bad_clips, tiny_config, prefetch):
    good, bad = (Item(clip) for clip in (read_manifest(CLIPS)[0], bad_clips["truncated"]))
    plan = [[good], [good, bad], [], [bad], [good], [bad, good, bad], [good]]
    batches = list(load(plan, FeatureSettings(), 2, training=tiny_config, prefetch=prefetch))
    assert [list(batch.items) for batch in batches] == [[item for item in items if item is good] for items in plan]
    assert [len(batch.skipped) for batch in batches] == [items.count(bad) for items in plan]


def test_a_bad_clip_does_not_lead_through_the_whole_plan(bad_clips, tiny_config):
    looked = []

    class Counted(list):
        def __len__(self):
            looked.append(self)
            return super().__len__()

    items = Item(bad_clips["truncated"]), Item(read_manifest(CLIPS)[0])
    batches = load([Counted([item]) for item in (*items, *items[1:] * 998)], FeatureSettings(), 1, training=tiny_config)
    assert [len(batch.skipped) for batch in itertools.islice(batches, 2)] == [1, 0]
    assert len(looked) < 1100


def test_a_clip_of_which_dali_makes_another_error_is_left_out_too(tiny_config, tmp_path, monkeypatch):
    """Of an absurd length it makes a ValueError. No file is known that gets there, so DALI is given what is refused."""
    good, bad = Item(read_manifest(CLIPS)[0]), Item(Clip(tmp_path / "twice.ogg", 2.0, "a"))
    parts = [tmp_path / "first.ogg", tmp_path / "second.ogg"]
    for path in parts:
        soundfile.write(path, np.random.default_rng(0).uniform(-0.1, 0.1, (320_000, 2)), 16_000)
    bad.clip.audio_filepath.write_bytes(b"".join(path.read_bytes() for path in parts))
    monkeypatch.setattr(audio, "joined_format", lambda data: "")
    monkeypatch.setattr(audio, "_UNKNOWN_FRAMES", 0)
    monkeypatch.setattr(audio, "MOST_EXCESS_S", 1e15)
    batches = list(load([[bad], [good, bad], [good]], FeatureSettings(), 1, training=tiny_config))
    assert [list(batch.items) for batch in batches] == [[], [good], [good]]
    assert [len(batch.skipped) for batch in batches] == [1, 1, 0]


def test_a_bad_clip_is_left_out_beside_one_behind_a_tag(tiny_config, tmp_path):
    """DALI rewrote what looks for the end of a tag while the bad clip was looked for."""
    good, bad = Item(Clip(tmp_path / "a.mp3", 2.0, "a")), Item(Clip(tmp_path / "a.flac", 2.0, "a"))
    for path in (good.clip.audio_filepath, bad.clip.audio_filepath):
        soundfile.write(path, np.random.default_rng(0).uniform(-0.1, 0.1, 32_000), 16_000)
        data = path.read_bytes()
        path.write_bytes(b"ID3\4\0\0\0\0\0\0" + data if path.suffix == ".mp3" else data[: len(data) // 2])
    (batch,) = load([[good, bad]], FeatureSettings(), 1, training=tiny_config)
    assert batch.items == [good]
    assert len(batch.skipped) == 1


def test_a_file_that_no_memory_holds_is_left_out(tiny_config, tmp_path):
    huge = Item(Clip(tmp_path / "huge.wav", 2.0, "a"))
    huge.clip.audio_filepath.touch()
    os.truncate(huge.clip.audio_filepath, 2**43)
    good = Item(read_manifest(CLIPS)[0])
    (batch,) = load([[huge, good]], FeatureSettings(), 1, training=tiny_config)
    assert batch.items == [good]
    assert batch.skipped == ((huge, "MemoryError()"),)


@pytest.mark.parametrize("duration", [140_000, 300_000, 1e6])
def test_a_duration_that_is_not_in_seconds_is_named(duration):
    """As samples at 16 kHz it does not fit into 32 bits."""
    clip = read_manifest(CLIPS)[0]
    with pytest.raises(RuntimeError, match=rf"{clip.audio_filepath}: lasts .* but its manifest says {duration}"):
        list(load([[Item(dataclasses.replace(clip, duration=duration))]], FeatureSettings(), 1))


def test_evaluation_refuses_bad_clips_by_name(bad_clips):
    with pytest.raises(RuntimeError, match=r"text\.wav: "):
        list(load([[Item(read_manifest(CLIPS)[0]), Item(bad_clips["text"])]], FeatureSettings(), 1))
    with pytest.raises(RuntimeError, match=r"nan\.wav: samples that are no finite numbers"):
        list(load([[Item(bad_clips["nan"])]], FeatureSettings(), 1))


def test_bad_segments_of_one_file_are_each_named_by_where_they_begin(bad_clips, tiny_config, caplog):
    segments = [Item(dataclasses.replace(bad_clips["silent"], duration=0.5, offset=offset)) for offset in (0.0, 1.0)]
    list(load([segments], FeatureSettings(), 1, training=tiny_config))
    assert [line.partition(": ")[0][-15:] for line in caplog.messages] == ["lent.wav at 0 s", "lent.wav at 1 s"]
    segments = [Item(dataclasses.replace(bad_clips["nan"], duration=3.0, offset=offset)) for offset in (0.0, 0.1)]
    with pytest.raises(
        RuntimeError, match=r"(?s)nan\.wav at 0 s: lasts 2\.00 s.*\n.*nan\.wav at 0\.1 s: lasts 1\.90 s"
    ):
        list(load([segments], FeatureSettings(), 1))


def test_evaluation_names_the_bad_clips_of_all_batches_and_stops_at_the_first(bad_clips):
    good, first, second = (Item(clip) for clip in (read_manifest(CLIPS)[0], bad_clips["text"], bad_clips["nan"]))
    batches = load([[good], [first], [good], [second]], FeatureSettings(), 1)
    assert next(batches).items == [good]
    with pytest.raises(RuntimeError, match=r"(?s)text\.wav: .*\n.*nan\.wav: "):
        next(batches)


def test_evaluation_names_the_manifest_and_at_most_ten_of_its_bad_clips(bad_clips):
    bad = [Item(dataclasses.replace(bad_clips["nan"], duration=1.5 - i / 100, offset=0.0)) for i in range(3)]
    items = [*bad, *(Item(bad_clips["text"]) for _ in range(10)), Item(read_manifest(CLIPS)[0])]
    with pytest.raises(RuntimeError) as error:
        list(load([items[:6], items[6:]], FeatureSettings(), 1, manifest=Path("m.jsonl")))
    head, *named, last = str(error.value).splitlines()
    assert head == "m.jsonl must name clean clips, but 13 of 14 are bad:"
    assert [line.partition(":")[0] for line in named] == [f"  {item.title}" for item in items[:10]]
    assert last == "  and 3 more"


def test_missing_files_are_told_before_any_other_is_decoded(bad_clips, monkeypatch):
    clips = [*read_manifest(CLIPS), bad_clips["missing"], bad_clips["pipe"], bad_clips["text"]]
    monkeypatch.setattr("carnelian_training.data.loading.run_surviving", lambda *_: pytest.fail("decodes"))
    with pytest.raises(RuntimeError) as error:
        next(load([[Item(clip)] for clip in clips], FeatureSettings(), 1, manifest=Path("m.jsonl")))
    assert str(error.value).splitlines() == [
        "m.jsonl must name clean clips, but 2 of 9 are bad (a relative path begins at the manifest's own folder):",
        f"  {bad_clips['missing'].title}: No such file or directory",
        f"  {bad_clips['pipe'].title}: must be a regular file, but is a folder, a pipe or a device",
    ]


def test_without_a_cufft_that_dali_can_use_features_are_computed_on_the_cpu(tiny_config, monkeypatch, caplog):
    batches = [[Item(clip) for clip in read_manifest(tiny_config.data.dev)]]
    (plain,) = load(batches, FeatureSettings(), 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("carnelian_training.data.loading.GetCufftVersion", lambda: -1)  # as where it cannot be loaded
    for _ in range(2):
        (found,) = load(batches, FeatureSettings(), 1)
        torch.testing.assert_close(found.features, plain.features, rtol=0, atol=0)
    assert caplog.text.count("pip install nvidia-cufft-cu12") == 1
