"""The checkpoints in the folder of a run."""

import dataclasses
import re
import time
from contextlib import suppress

import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.config_errors import ConfigError
from carnelian_training.loop.run_checkpoints import checkpoints, newest, resume
from carnelian_training.loop.state import PARTS, new_state
from carnelian_training.loop.train import evaluate, train
from carnelian_training.replacement import WriteError
from carnelian_training.weight_files import CheckpointError


def test_a_damaged_checkpoint_falls_back_to_the_one_before(state, config, tmp_path, caplog, write_at):
    write_at(state, config, tmp_path, 1, 2)
    whole = (tmp_path / "tiny-00000002.pt").read_bytes()
    (tmp_path / "tiny-00000002.pt").write_bytes(whole[: len(whole) // 2])
    assert resume(state, config, tmp_path)
    assert state.step == 1
    assert "tiny-00000002.pt is damaged: File is not a zip file" in caplog.text
    assert "falling back to the checkpoint before it" in caplog.text
    rotten = bytearray(whole)
    rotten[len(whole) // 2] ^= 1
    (tmp_path / "tiny-00000002.pt").write_bytes(rotten)
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000001.pt"
    assert "does not have its checksum" in caplog.text
    rotten = bytearray(whole)
    rotten[whole.index(b"data.pkl", whole.index(b"PK\x01\x02"))] = 0xE3  # in the archive's directory: no UTF-8
    (tmp_path / "tiny-00000002.pt").write_bytes(rotten)
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt is damaged: 'utf-8' codec can't decode" in caplog.text
    (tmp_path / "tiny-00000001.pt").write_bytes(b"")
    caplog.clear()
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoints in .*; to start anew, remove them"):
        newest(tmp_path, config)
    assert ["falling back" in message for message in caplog.messages] == [True, False]  # there is none before the last


def test_the_checkpoint_to_resume_is_read_once(state, config, tmp_path, monkeypatch, write_at):
    write_at(state, config, tmp_path, 1)
    load, paths = checkpoint.load, []
    monkeypatch.setattr(checkpoint, "load", lambda path: paths.append(path) or load(path))
    assert resume(state, config, tmp_path)
    assert paths == [tmp_path / "tiny-00000001.pt"]


def test_weights_alone_are_no_run_to_resume(state, config, tmp_path, caplog, write_at):
    write_at(state, config, tmp_path, 1, 2)
    checkpoint.publish(tmp_path / "tiny-00000002.pt", tmp_path / "published.pt")
    (tmp_path / "published.pt").replace(tmp_path / "tiny-00000002.pt")
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt must hold the state of a run to be resumed, but has weights alone" in caplog.text


def drop_parts(path, *parts):
    before, content = checkpoint.load(path)
    assert set(content["training"]) == set(PARTS)
    training = {part: value for part, value in content["training"].items() if part not in parts}
    checkpoint.save(path, before, content["weights"], results=content["results"], training=training)


def test_a_checkpoint_without_the_whole_state_is_passed_over(state, config, tmp_path, caplog, write_at):
    write_at(state, config, tmp_path, 1, 2)
    drop_parts(tmp_path / "tiny-00000002.pt", "epoch", "memory")
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt must hold the whole state of a run, but lacks epoch, memory" in caplog.text


def test_nobody_is_told_to_remove_whole_weights(state, config, tmp_path, write_at):
    """Where all checkpoints were of another version, the advice was to remove them: weeks of training."""
    write_at(state, config, tmp_path, 1, 2)
    drop_parts(tmp_path / "tiny-00000001.pt", "best_error")
    (tmp_path / "tiny-00000002.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"take another --out, and .* of another version goes on with that version"
    ) as caught:
        newest(tmp_path, config)
    assert f"`init.checkpoint={tmp_path / 'tiny-00000001.pt'}`" in str(caught.value)
    assert "remove them" not in str(caught.value)


def test_the_best_weights_are_what_to_start_from(state, config, tmp_path, write_at):
    """The newest were named, which are seldom the best."""
    write_at(state, config, tmp_path, 1, 2)
    best = tmp_path / "tiny.pt"
    checkpoint.publish(tmp_path / "tiny-00000001.pt", best)
    for step in (1, 2):
        drop_parts(tmp_path / f"tiny-0000000{step}.pt", "best_error")
    with pytest.raises(CheckpointError, match=re.escape(f"`init.checkpoint={best}` to start")):
        newest(tmp_path, config)
    best.write_bytes(b"")
    with pytest.raises(CheckpointError, match=re.escape(f"`init.checkpoint={tmp_path / 'tiny-00000002.pt'}` to start")):
        newest(tmp_path, config)


def test_what_a_killed_run_had_half_written_goes(state, config, tmp_path, write_at):
    partial = f".{'0a' * 8}."
    others = [f"{partial}tiny2-00000001.pt", f"{partial}metrics.jsonl", "tiny.pt"]
    for name in (f"{partial}tiny-00000001.pt", f"{partial}tiny.pt", f"{partial}tiny.png", *others):
        (tmp_path / name).write_bytes(b"half")
    write_at(state, config, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "tiny-00000002.pt"])


def test_a_run_that_was_killed_in_its_first_checkpoint_begins_again(state, config, tmp_path):
    (tmp_path / f".{'0a' * 8}.tiny-00000001.pt").write_bytes(b"half")
    assert newest(tmp_path, config) is None


@pytest.mark.parametrize("num_bytes", [10_000, 300_000])
def test_a_disk_without_room_is_named_and_loses_nothing(config, tmp_path, room, num_bytes):
    path = tmp_path / "x.pt"
    checkpoint.save(path, config, {"weight": torch.ones(3)}, results={})
    with room(num_bytes), pytest.raises(WriteError, match=r"x\.pt could not be .* as it was before: File too large"):
        checkpoint.save(path, config, {"weight": torch.ones(100_000)}, results={})
    assert torch.equal(checkpoint.load(path)[1]["weights"]["weight"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_the_folder_of_another_run_is_refused(state, config, tmp_path, write_at):
    write_at(state, config, tmp_path, 1)
    for name in ("other", "tin"):
        with pytest.raises(ConfigError, match=rf"tiny-00000001\.pt is not one of `{name}`: take another --out"):
            newest(tmp_path, dataclasses.replace(config, name=name))


def test_best_weights_alone_are_not_overwritten(state, config, tmp_path, write_at):
    (tmp_path / "tiny.pt").write_bytes(b"an import, or what is left of a run")
    with pytest.raises(ConfigError, match=r"tiny\.pt would be replaced, .* take another --out or another `name`"):
        newest(tmp_path, config)
    write_at(state, config, tmp_path, 1)
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000001.pt"


@pytest.mark.parametrize(
    "loop",
    [
        {"steps": 2, "evaluate_every_steps": 1000},
        {"steps": 3, "evaluate_every_steps": 1000, "milestones": (2,)},
        {"steps": 100, "evaluate_every_steps": 1, "checkpoint_every_steps": 100},
    ],
    ids=["ended", "ended behind a milestone", "killed before its first planned checkpoint"],
)
def test_best_weights_that_a_run_left_are_not_overwritten(config, changed, tmp_path, monkeypatch, loop):
    config = changed(config, loop={"checkpoint_every_steps": None, **loop})

    def evaluate_or_die(state, *arguments):
        if state.step == 3 and config.loop.steps == 100:
            raise KeyboardInterrupt  # passed on as it is, so nothing is written as the run ends
        evaluate(state, *arguments)

    monkeypatch.setattr("carnelian_training.loop.train.evaluate", evaluate_or_die)
    with suppress(KeyboardInterrupt):
        train(config, tmp_path)
    best = (tmp_path / "tiny.pt").read_bytes()
    assert checkpoints(tmp_path, config)
    for path in checkpoints(tmp_path, config):
        path.unlink()
    with pytest.raises(ConfigError, match=r"tiny\.pt would be replaced"):
        train(changed(config, loop={"seed": 2}), tmp_path)
    assert (tmp_path / "tiny.pt").read_bytes() == best


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "damaged"])
def test_best_weights_that_are_gone_or_damaged_are_chosen_anew(config, changed, tmp_path, caplog, is_gone):
    config = changed(config, optimizer={"lr": 1e-12, "min_lr": 0.0})  # no evaluation is better than the one before
    train(changed(config, loop={"steps": 2, "evaluate_every_steps": 1}), tmp_path)
    best = tmp_path / "tiny.pt"
    warning = f"{best} is gone or damaged: the best weights are chosen anew"
    assert warning not in caplog.text
    content = best.read_bytes()
    best.unlink()
    if not is_gone:
        best.write_bytes(content[: len(content) // 2])
    for steps in (2, 3):  # with 2, there is nothing to do
        train(changed(config, loop={"steps": steps, "evaluate_every_steps": 1}), tmp_path)
        assert caplog.text.count(warning) == steps - 1
    assert checkpoint.load(best)[1]["results"]["step"] == 3
    train(changed(config, loop={"steps": 3, "evaluate_every_steps": 1}), tmp_path)
    assert caplog.text.count(warning) == 2


def test_a_name_is_no_pattern(state, config, tmp_path, write_at):
    config = dataclasses.replace(config, name="tiny [a]*")
    write_at(state, config, tmp_path, 1)
    assert newest(tmp_path, config)[0] == tmp_path / "tiny [a]*-00000001.pt"


def test_milestones_outlive_the_newest(state, config, changed, tmp_path, write_at):
    config = changed(config, loop={"milestones": (3,), "keep_last": 2, "checkpoint_every_steps": 100})
    assert [state.checkpoint_is_due(config) for state.step in (2, 3, 100)] == [False, True, True]
    write_at(state, config, tmp_path, 1, 2, 3, 4, 5)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["3", "4", "5"]


def test_checkpoints_may_follow_the_clock(state, config, changed, tmp_path, monkeypatch, write_at):
    assert not state.checkpoint_is_overdue(config)
    assert not state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))
    write_at(state, config, tmp_path, 1)
    assert not state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))


def test_a_run_writes_checkpoints_by_the_clock(config, changed, tmp_path):
    loop = {"steps": 3, "checkpoint_every_steps": 100, "checkpoint_every_s": 1e-9, "keep_last": 3}
    train(changed(config, loop=loop), tmp_path)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["1", "2", "3"]


def test_milestones_stay_when_others_are_set(state, config, changed, tmp_path, write_at):
    config = changed(config, loop={"milestones": (1,), "keep_last": 1})
    write_at(state, config, tmp_path, 1)
    for step, milestones in ((2, (2,)), (3, ())):
        config = changed(config, loop={"milestones": milestones})
        state = new_state(config, state.process)
        assert resume(state, config, tmp_path)
        write_at(state, config, tmp_path, step)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["1", "2", "3"]


def test_what_is_written_beside_damaged_later_ones_stays(state, config, changed, tmp_path, write_at):
    config = changed(config, loop={"keep_last": 1})
    (tmp_path / "tiny-00000009.pt").write_bytes(b"damaged")
    write_at(state, config, tmp_path, 1, 2)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["2", "9"]
    assert newest(tmp_path, config)[0] == tmp_path / "tiny-00000002.pt"
