import dataclasses
from pathlib import Path

import numpy as np
import pytest
from carnelian_training.config import AugmentConfig
from carnelian_training.data.defects import text_defect
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item, deal, group, plan_epoch, trainable


def clips(*durations: float) -> list[Clip]:
    return [Clip(Path(f"{i}.wav"), duration, "a") for i, duration in enumerate(durations)]


def test_an_epoch_depends_on_seed_and_number_alone_and_holds_every_clip_once(tiny_config):
    many = clips(*np.linspace(1, 9, 50))
    first, again, other = (plan_epoch(many, tiny_config, epoch) for epoch in (0, 0, 1))
    assert first == again != other
    for plan in (first, other):
        assert sorted(item.clip.duration for batch in plan for item in batch) == [clip.duration for clip in many]


def test_batches_are_of_like_lengths_and_others_in_every_epoch_and_come_in_random_order(tiny_config):
    config = dataclasses.replace(tiny_config, augment=AugmentConfig(speed=(1.0, 1.0)))
    epochs = [
        [[item.duration_s for item in batch] for batch in plan_epoch(clips(*np.linspace(1, 3, 2000)), config, epoch)]
        for epoch in (0, 1)
    ]
    for batches in epochs:
        padded_s = sum(len(batch) * max(batch) for batch in batches)
        assert padded_s < 1.15 * sum(map(sum, batches))  # 1.4 in any order
        longest = [max(batch) for batch in batches]
        half = len(longest) // 2
        assert np.mean(longest[:half]) == pytest.approx(np.mean(longest[half:]), abs=0.3)  # 1 apart in sorted order
    first, second = ({frozenset(batch) for batch in batches} for batches in epochs)
    assert len(first & second) < len(first) / 2


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


def test_clips_that_cannot_be_learnt_are_left_out_and_counted(tiny_config, caplog, monkeypatch):
    good = Clip(Path("good.wav"), 2.0, "hello")
    bad = [
        Clip(Path("long.wav"), 99.0, "hello"),
        Clip(Path("letters.wav"), 2.0, "héllo"),
        Clip(Path("other letters.wav"), 2.0, "hällo"),
        Clip(Path("dense.wav"), 0.5, "as fast as nobody can speak"),
        Clip(Path("empty.wav"), 2.0, " "),
    ]
    assert trainable([good, *bad], tiny_config, Path("some.jsonl")) == [good]
    assert "left out 2 of 6 clips of some.jsonl: characters outside the labels: 'äé'" in caplog.text
    for reason in ("duration", "empty transcript", "transcript longer than CTC can align"):
        assert f"left out 1 of 6 clips of some.jsonl: {reason}, such as " in caplog.text
    limits = "99 s, outside 0.2 to 16.7 s (`data.min_duration_s`, `data.max_duration_s`)"
    assert f"duration, such as long.wav: {limits}\n" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    assert trainable([good, *bad], tiny_config, Path("some.jsonl")) == [good]
    assert not caplog.messages  # the first process has said it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello", " (the text's lower case is within them): 'H'"),
        ("ж", " (the text's upper case is within them): 'ж'"),
        (
            "e\N{COMBINING ACUTE ACCENT}",
            r" (the text's composed form, NFC, is within them): '\u0301'",
        ),
        ("he\u00adllo!", r" (`to_given_labels` can write the text in them): '!\xad'"),
        ("Ö", ": 'Ö'"),
    ],
)
def test_other_characters_come_with_what_would_mend_them(tiny_config, text, words):
    config = dataclasses.replace(tiny_config, labels=(*tiny_config.labels, "é", "Ж"))
    assert str(text_defect(Clip(Path("a.wav"), 2.0, text), config)) == f"characters outside the labels{words}"


@pytest.mark.parametrize(("labels", "text"), [(" ığdi", "IĞDI"), (" ığdi", "ĞD"), (" IİĞD", "iğdi")])
def test_the_usual_case_is_not_recommended_where_it_gives_other_letters(tiny_config, labels, text):
    defect = text_defect(Clip(Path("a.wav"), 2.0, text), dataclasses.replace(tiny_config, labels=tuple(labels)))
    assert defect.reason == "characters outside the labels (`to_given_labels` can write the text in them)"


def test_another_seed_gives_another_epoch(tiny_config, changed):
    many = clips(*np.linspace(1, 9, 50))
    plans = [plan_epoch(many, changed(tiny_config, loop={"seed": seed}), 0) for seed in (1, 2)]
    lengths, seeds = (
        [[[what(item) for item in batch] for batch in plan] for plan in plans]
        for what in (lambda item: item.clip.duration, lambda item: item.seed)
    )
    assert lengths[0] != lengths[1]
    assert not {seed for batch in seeds[0] for seed in batch} & {seed for batch in seeds[1] for seed in batch}
