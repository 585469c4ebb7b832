import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from carnelian_training.checkpoint import build_model
from carnelian_training.config import AugmentConfig
from carnelian_training.data.audio import encoded
from carnelian_training.data.augment import spec_augment, warp_frequency
from carnelian_training.data.defects import Limits, text_defect
from carnelian_training.data.loading import Item, deal, group, load, plan_epoch, trainable
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.features import FeatureSettings
from torch.nn import functional as F

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"


def clips(*durations: float) -> list[Clip]:
    return [Clip(Path(f"{i}.wav"), duration, "a") for i, duration in enumerate(durations)]


def test_an_epoch_depends_on_seed_and_number_alone_and_holds_every_clip_once(tiny_config):
    many = clips(*np.linspace(1, 9, 50))
    first, again, other = (plan_epoch(many, tiny_config, epoch) for epoch in (0, 0, 1))
    assert first == again != other
    for plan in (first, other):
        assert sorted(item.clip.duration for batch in plan for item in batch) == [clip.duration for clip in many]


@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
@pytest.mark.parametrize("device_batch_s", [None, 5, 20])
def test_shares_hold_every_clip_once_and_have_equally_many_parts(tiny_config, world_size, device_batch_s):
    for step in plan_epoch(clips(*np.linspace(1, 9, 50)), tiny_config, 3):
        dealt = [deal(step, device_batch_s, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert len({len(parts) for parts in dealt}) == 1
        parts = [part for parts in dealt for part in parts]
        assert sorted(item.seed for part in parts for item in part) == sorted(item.seed for item in step)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for part in parts:
            padded_s = len(part) * max((item.duration_s for item in part), default=0)
            assert device_batch_s is None or len(part) <= 1 or padded_s <= device_batch_s


def test_a_step_that_fits_is_taken_at_once():
    step = [Item(clip) for clip in clips(4, 5, 5)]
    assert deal(step, 15) == deal(step, None) == [step]
    assert deal(step, 14) == [[step[0], step[2]], [step[1]]]


def test_an_empty_share_runs_through_network_and_loss(tiny_config):
    (empty,) = load([[]], FeatureSettings(), 1)
    assert empty.items == ()
    log_probs, lengths = build_model(tiny_config).eval()(empty.features, empty.lengths)
    targets, target_lengths = empty.targets(tiny_config.labels)
    loss = F.ctc_loss(log_probs.transpose(0, 1), targets, lengths, target_lengths, reduction="sum")
    loss.backward()
    assert loss == 0


def test_a_clip_is_augmented_alike_in_every_batch():
    config, lengths = AugmentConfig(frequency_warp=0.1), torch.tensor([90, 80, 70])
    features = torch.randn(3, 64, 90, generator=torch.Generator().manual_seed(0))
    for augment in (lambda x, n, s: spec_augment(x, n, config, s), lambda x, n, s: warp_frequency(x, config, s)):
        together, alone = augment(features, lengths, [7, 8, 9]), augment(features[1:2], lengths[1:2], [8])
        torch.testing.assert_close(together[1], alone[0])


def test_batches_keep_the_budget_of_padded_seconds():
    batches = group([Item(clip) for clip in clips(1, 2, 3, 4, 5, 30)], 10)
    assert [[item.clip.duration for item in batch] for batch in batches] == [[1, 2, 3], [4, 5], [30]]


def test_speed_happens_with_its_probability(tiny_config):
    augment = AugmentConfig(speed=(1.1, 1.2), speed_probability=0.3)
    config = dataclasses.replace(tiny_config, augment=augment)
    speeds = [item.speed for batch in plan_epoch(clips(*[2.0] * 4000), config, 0) for item in batch]
    changed = [speed for speed in speeds if speed != 1.0]
    assert all(1.1 <= speed <= 1.2 for speed in changed)
    assert len(changed) / len(speeds) == pytest.approx(0.3, abs=0.03)


def test_discrete_speeds_are_equally_likely(tiny_config):
    augment = AugmentConfig(speed_factors=(0.9, 1.0, 1.1))
    config = dataclasses.replace(tiny_config, augment=augment)
    speeds = [item.speed for batch in plan_epoch(clips(*[2.0] * 3000), config, 0) for item in batch]
    for factor in (0.9, 1.0, 1.1):
        assert speeds.count(factor) / len(speeds) == pytest.approx(1 / 3, abs=0.03)
    assert (augment.fastest, AugmentConfig(speed_probability=0.0).fastest) == (1.1, 1.0)


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


def test_training_leaves_out_exactly_the_bad_clips(bad_clips, tiny_config, caplog):
    good = read_manifest(CLIPS)
    mixed = [clip for pair in zip(bad_clips.values(), [*good, *good], strict=False) for clip in pair]
    items = [Item(clip, 1.05) for clip in mixed]
    first, alone, second = load(
        [items, items[:1], [Item(clip) for clip in good]], FeatureSettings(), 1, skip=Limits.of(tiny_config)
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
        "truncated": "Requested",
        "empty": "no samples",
        "silent": "silent: root mean square",
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


@pytest.mark.parametrize("prefetch", [1, 4])
def test_batches_ahead_of_a_bad_clip_keep_their_order(bad_clips, tiny_config, prefetch):
    good, bad = (Item(clip) for clip in (read_manifest(CLIPS)[0], bad_clips["truncated"]))
    plan = [[good], [good, bad], [], [bad], [good], [bad, good, bad], [good]]
    batches = list(load(plan, FeatureSettings(), 2, skip=Limits.of(tiny_config), prefetch=prefetch))
    assert [list(batch.items) for batch in batches] == [[item for item in items if item is good] for items in plan]
    assert [len(batch.skipped) for batch in batches] == [items.count(bad) for items in plan]


def test_evaluation_refuses_bad_clips_by_name(bad_clips):
    with pytest.raises(RuntimeError, match=r"text\.wav: "):
        list(load([[Item(read_manifest(CLIPS)[0]), Item(bad_clips["text"])]], FeatureSettings(), 1))
    with pytest.raises(RuntimeError, match=r"nan\.wav: samples that are no finite numbers"):
        list(load([[Item(bad_clips["nan"])]], FeatureSettings(), 1))


def test_bad_segments_of_one_file_are_each_named_by_where_they_begin(bad_clips, tiny_config, caplog):
    segments = [Item(dataclasses.replace(bad_clips["silent"], duration=0.5, offset=offset)) for offset in (0.0, 1.0)]
    list(load([segments], FeatureSettings(), 1, skip=Limits.of(tiny_config)))
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


def test_a_segment_is_what_it_cuts_out(tmp_path):
    sound = np.random.default_rng(0).standard_normal((88200, 2)).astype(np.float32) * 0.1
    for format_ in ("wav", "flac"):
        soundfile.write(tmp_path / f"long.{format_}", sound, 44100)
        soundfile.write(tmp_path / f"cut.{format_}", sound[22050:66150], 44100)
        segment = Clip(tmp_path / f"long.{format_}", 1.0, "a", offset=0.5)
        cut = Clip(tmp_path / f"cut.{format_}", 1.0, "a")
        (batch,) = load([[Item(segment), Item(cut)]], FeatureSettings(), 1)
        assert batch.lengths.tolist() == [101, 101]
        torch.testing.assert_close(batch.features[0], batch.features[1])


def test_mp3_whose_length_libsndfile_would_guess_is_refused(tmp_path):
    """Without the header in front, as after a pipe, a third of speech is cut off without a word."""
    speech, rate_hz = soundfile.read(CLIPS.parent / "letter.wav")
    for mode in ("VARIABLE", "CONSTANT"):
        whole = tmp_path / f"{mode}.mp3"
        soundfile.write(whole, speech, rate_hz, bitrate_mode=mode, compression_level=0.5)
        sound = whole.read_bytes()
        first_frame = sound.index(sound[:2], 4)
        (tmp_path / f"{mode}_pipe.mp3").write_bytes(sound[first_frame:])
    lines = [("VARIABLE", None), ("CONSTANT", None), ("CONSTANT_pipe", None)]
    clips = [Clip(tmp_path / f"{name}.mp3", 3.6, "a", offset=offset) for name, offset in lines]
    (batch,) = load([[Item(clip) for clip in clips]], FeatureSettings(), 1)
    assert min(batch.lengths) >= 360
    for offset in (None, 1.0):
        piped = Item(Clip(tmp_path / "VARIABLE_pipe.mp3", 1.0, "a", offset=offset))
        with pytest.raises(RuntimeError, match="must say how long it is"):
            list(load([[piped]], FeatureSettings(), 1))


def test_mp3_files_are_read(tmp_path):
    tone = np.sin(2 * np.pi * 440 * np.arange(66150) / 22050).astype(np.float32) * 0.5
    for name in ("tone.mp3", "tone.wav"):
        soundfile.write(tmp_path / name, tone, 22050)
    mp3, wav = (Item(Clip(tmp_path / name, 3.0, "a")) for name in ("tone.mp3", "tone.wav"))
    (batch,) = load([[mp3, wav]], FeatureSettings(), 1)
    assert batch.lengths[0] == pytest.approx(batch.lengths[1], abs=2)
    (tmp_path / "text.mp3").write_text("no sound")
    with pytest.raises(RuntimeError, match=r"text\.mp3: "):
        list(load([[Item(Clip(tmp_path / "text.mp3", 3.0, "a"))]], FeatureSettings(), 1))


@pytest.mark.parametrize("tag", [b"", b"ID3\x04\0\0\0\0\0\x0a" + bytes(10)])
def test_an_mp3_file_may_have_another_name(tmp_path, tag):
    soundfile.write(tmp_path / "tone.mp3", np.sin(np.arange(32000) / 10) * 0.5, 16000)
    (tmp_path / "tone.wav").write_bytes(tag + (tmp_path / "tone.mp3").read_bytes())
    (batch,) = load([[Item(Clip(tmp_path / "tone.wav", 2.0, "a"))]], FeatureSettings(), 1)
    assert batch.lengths.item() == pytest.approx(201, abs=12)  # MP3 pads to whole frames


def test_flac_that_was_written_to_a_pipe_is_refused_before_dali_sees_it(tmp_path):
    path = tmp_path / "piped.flac"
    soundfile.write(path, np.zeros(1600), 16_000)
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match="FLAC must count its samples"):
        encoded(Clip(path, 0.1, "a"))


def test_a_segment_of_an_mp3_file_is_what_the_whole_file_has_there(tmp_path):
    """Where a decoder begins, it lacks the bits that frames before it kept for those after."""
    noise = np.cumsum(np.random.default_rng(0).standard_normal(128_000)) * (1 + np.sin(np.arange(128_000) / 3000))
    path = tmp_path / "long.mp3"
    sound = 0.5 * (noise - noise.mean()) / np.abs(noise).max()
    soundfile.write(path, sound, 16_000, bitrate_mode="VARIABLE", compression_level=0.9)
    whole, _ = soundfile.read(path, dtype="float32")
    for offset in np.arange(0.5, 7, 0.37):
        found, _ = soundfile.read(io.BytesIO(encoded(Clip(path, 0.5, "a", offset=offset)).tobytes()), dtype="float32")
        begin = round(offset * 16_000)
        np.testing.assert_allclose(found, whole[begin : begin + 8000], atol=1e-6)  # 0.35 was seen


def test_clips_that_cannot_be_learnt_are_left_out_and_counted(tiny_config, caplog, monkeypatch):
    good = Clip(Path("good.wav"), 2.0, "hello")
    bad = [
        Clip(Path("long.wav"), 99.0, "hello"),
        Clip(Path("letters.wav"), 2.0, "héllo"),
        Clip(Path("other letters.wav"), 2.0, "hällo"),
        Clip(Path("dense.wav"), 0.5, "as fast as nobody can speak"),
        Clip(Path("empty.wav"), 2.0, " "),
    ]
    assert trainable([good, *bad], tiny_config) == [good]
    assert "left out 2 of 6 clips: characters outside the labels: 'äé'" in caplog.text
    for reason in ("duration", "empty transcript", "transcript longer than CTC can align"):
        assert f"left out 1 of 6 clips: {reason}" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    assert trainable([good, *bad], tiny_config) == [good]
    assert not caplog.messages  # the first process has said it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello", " (the text's lower case is within them): 'H'"),
        ("ж", " (the text's upper case is within them): 'ж'"),
        (
            "e\N{COMBINING ACUTE ACCENT}",
            " (the text's composed form, NFC, is within them): '\N{COMBINING ACUTE ACCENT}'",
        ),
        ("Ö", ": 'Ö'"),
    ],
)
def test_other_characters_come_with_what_would_mend_them(tiny_config, text, words):
    limits = Limits.of(dataclasses.replace(tiny_config, labels=(*tiny_config.labels, "é", "Ж")))
    assert text_defect(Clip(Path("a.wav"), 2.0, text), limits) == f"characters outside the labels{words}"


def test_masks_stay_in_their_limits_and_follow_the_generator():
    config = AugmentConfig(
        frequency_masks=1, frequency_mask_bands=8, time_masks=1, time_mask_frames=20, time_mask_share=0.1
    )
    features, lengths = torch.ones(64, 64, 300), torch.full((64,), 300)
    masked, again = (spec_augment(features, lengths, config, range(64)) for _ in range(2))
    assert torch.equal(masked, again)
    bands = (masked == 0).all(2).sum(1)
    frames = (masked == 0).all(1).sum(1)
    assert 0 < bands.max() <= 8
    assert 0 < frames.max() <= 20
    assert len(set(bands.tolist())) > 4


def test_cutout_zeroes_boxes_within_the_clip():
    config = AugmentConfig(frequency_masks=0, time_masks=0, cutout_boxes=1, cutout_bands=20, cutout_frames=5)
    features, lengths = torch.ones(300, 64, 100), torch.full((300,), 50)
    cut = spec_augment(features, lengths, config, range(300)) == 0
    bands, frames = cut.any(2).sum(1), cut.any(1).sum(1)
    assert torch.equal(cut.sum((1, 2)), bands * frames)
    assert (bands.max(), frames.max()) == (20, 5)
    assert not cut[:, :, 50:].any()
    # Empty only where a width or a length of 0 was drawn: 1 / 21 and 1 / 6 of the clips.
    assert (bands == 0).float().mean() == pytest.approx(1 - 20 / 21 * 5 / 6, abs=0.06)


def test_warping_moves_a_tone_by_its_factor_in_hertz():
    mel_filters = torch.zeros(200, 64, 3)
    mel_filters[:, 40] = 1.0  # a tone in band 40, 2.8 kHz
    config = AugmentConfig(frequency_warp=0.1)
    warped = warp_frequency(mel_filters, config, range(200))
    bands = (warped[:, :, 0] * torch.arange(64)).sum(1) / warped[:, :, 0].sum(1)
    # Above 1 kHz a band is 0.695 mel, and 27 mel are a factor of 6.4 in Hz: +-10 % are about +-2 bands.
    assert bands.min() == pytest.approx(38.0, abs=0.3)
    assert bands.max() == pytest.approx(42.2, abs=0.3)
    unchanged = warp_frequency(mel_filters, AugmentConfig(), range(200))
    torch.testing.assert_close(unchanged, mel_filters)


def test_features_are_augmented_on_the_device_where_they_are():
    config = AugmentConfig(frequency_masks=1, time_masks=1, cutout_boxes=1, frequency_warp=0.1)
    features, lengths = torch.zeros(2, 64, 30, device="meta"), torch.tensor([30, 20], device="meta")
    warped = warp_frequency(features, config, range(2))
    assert spec_augment(warped, lengths, config, range(2)).is_meta
