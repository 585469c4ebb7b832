import dataclasses
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
import yaml
from carnelian_training import checkpoint
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import read_manifest, write_manifest
from carnelian_training.distributed import Process
from carnelian_training.loop import train
from carnelian_training.loop.recognition import Recognition
from carnelian_training.loop.run_checkpoints import checkpoints, newest, resume, write_checkpoint
from carnelian_training.loop.state import PARTS, new_state
from carnelian_training.loop.task import Finding
from carnelian_training.replacement import WriteError
from carnelian_training.weight_files import CheckpointError


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="module")
def config(tiny_config, changed):
    """Dropout, an average, parts of steps, and checkpoints between the evaluations."""
    return changed(
        tiny_config,
        data={"device_batch_s": 5},
        optimizer={"ema": 0.9},
        loop={"steps": 12, "checkpoint_every_steps": 2, "evaluate_every_steps": 12},
    )


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train.train(config, folder)
    return folder


def losses(folder) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def assert_same_end(one, other):
    assert losses(one) == losses(other)
    first, second = (checkpoint.load(folder / "tiny-00000012.pt")[1] for folder in (one, other))
    for name, weights in first["weights"].items():
        assert torch.equal(weights, second["weights"][name]), name
        assert torch.equal(first["training"]["weights"][name], second["training"]["weights"][name]), name
    moments = [content["training"]["optimizer"]["state"] for content in (first, second)]
    for index, moment in moments[0].items():
        assert all(torch.equal(value, moments[1][index][name]) for name, value in moment.items())


def test_a_killed_run_goes_on_to_the_bit(config, whole, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    command = "from carnelian_training.cli import main; main()"
    arguments = ["fit", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "parts")]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums of other parts round in another way
    run = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, env=os.environ | threads
    )
    while run.poll() is None and len(checkpoints(tmp_path / "parts", config)) == 0:
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    run.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    train.train(config, tmp_path / "parts")
    assert_same_end(whole, tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_to_the_bit(
    config, whole, tmp_path, monkeypatch, caplog, number
):
    optimise = train.optimise

    def interrupted(state, share, config):
        if state.step == 4:
            os.kill(os.getpid(), number)
        return optimise(state, share, config)

    monkeypatch.setattr(train, "optimise", interrupted)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        train.train(config, tmp_path / "parts")
    assert stopped.value.code == 128 + number
    assert f"stopped by {number.name} after step 5" in caplog.text
    assert checkpoints(tmp_path / "parts", config)[-1].name == "tiny-00000005.pt"
    assert signal.getsignal(number) is handler
    train.train(config, tmp_path / "parts")
    assert_same_end(whole, tmp_path / "parts")


def test_an_evaluation_that_a_signal_came_before_is_made_up_for(config, whole, tmp_path, monkeypatch):
    optimise = train.optimise

    def interrupted(state, share, config):
        if state.step == config.loop.steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return optimise(state, share, config)

    with monkeypatch.context() as interrupting:
        interrupting.setattr(train, "optimise", interrupted)
        with pytest.raises(SystemExit):
            train.train(config, tmp_path)
    assert not (tmp_path / "tiny.pt").exists()
    train.train(config, tmp_path)
    assert_same_end(whole, tmp_path)
    best, of_whole = (checkpoint.load(folder / "tiny.pt")[1] for folder in (tmp_path, whole))
    assert best["results"] == of_whole["results"]


@pytest.fixture
def state(config):
    return new_state(config, Process(torch.device("cpu")))


def write_at(state, config, folder, *steps):
    folder.mkdir(exist_ok=True)
    for state.step in steps:
        write_checkpoint(state, config, folder)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(state, config, tmp_path, caplog):
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
    assert newest(tmp_path, config) == tmp_path / "tiny-00000001.pt"
    assert "does not have its checksum" in caplog.text
    rotten = bytearray(whole)
    rotten[whole.index(b"data.pkl", whole.index(b"PK\x01\x02"))] = 0xE3  # in the archive's directory: no UTF-8
    (tmp_path / "tiny-00000002.pt").write_bytes(rotten)
    assert newest(tmp_path, config) == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt is damaged: 'utf-8' codec can't decode" in caplog.text
    (tmp_path / "tiny-00000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoints in .*; to start anew, remove them"):
        newest(tmp_path, config)


def test_weights_alone_are_no_run_to_resume(state, config, tmp_path, caplog):
    write_at(state, config, tmp_path, 1, 2)
    checkpoint.publish(tmp_path / "tiny-00000002.pt", tmp_path / "published.pt")
    (tmp_path / "published.pt").replace(tmp_path / "tiny-00000002.pt")
    assert newest(tmp_path, config) == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt must hold the state of a run to be resumed, but has weights alone" in caplog.text


def drop_parts(path, *parts):
    before, content = checkpoint.load(path)
    assert set(content["training"]) == set(PARTS)
    training = {part: value for part, value in content["training"].items() if part not in parts}
    checkpoint.save(path, before, content["weights"], results=content["results"], training=training)


def test_a_checkpoint_without_the_whole_state_is_passed_over(state, config, tmp_path, caplog):
    write_at(state, config, tmp_path, 1, 2)
    drop_parts(tmp_path / "tiny-00000002.pt", "epoch", "memory")
    assert newest(tmp_path, config) == tmp_path / "tiny-00000001.pt"
    assert "tiny-00000002.pt must hold the whole state of a run, but lacks epoch, memory" in caplog.text


def test_nobody_is_told_to_remove_whole_weights(state, config, tmp_path):
    """Where all checkpoints were of another version, the advice was to remove them: weeks of training."""
    write_at(state, config, tmp_path, 1, 2)
    drop_parts(tmp_path / "tiny-00000001.pt", "best_error")
    (tmp_path / "tiny-00000002.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"take another --out, and .* of another version goes on with that one"
    ) as caught:
        newest(tmp_path, config)
    assert f"`init.checkpoint={tmp_path / 'tiny-00000001.pt'}`" in str(caught.value)
    assert "remove them" not in str(caught.value)


def test_what_a_killed_run_had_half_written_goes(state, config, tmp_path):
    others = [".12.tiny2-00000001.pt", ".12.metrics.jsonl", "tiny.pt"]
    for name in (".12.tiny-00000001.pt", ".12.tiny.pt", ".12.tiny.png", *others):
        (tmp_path / name).write_bytes(b"half")
    write_at(state, config, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "tiny-00000002.pt"])


@pytest.mark.parametrize("num_bytes", [10_000, 300_000])
def test_a_disk_without_room_is_named_and_loses_nothing(config, tmp_path, room, num_bytes):
    path = tmp_path / "x.pt"
    checkpoint.save(path, config, {"weight": torch.ones(3)}, results={})
    with room(num_bytes), pytest.raises(WriteError, match=r"x\.pt could not be .* as it was before: File too large"):
        checkpoint.save(path, config, {"weight": torch.ones(100_000)}, results={})
    assert torch.equal(checkpoint.load(path)[1]["weights"]["weight"], torch.ones(3))
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_the_folder_of_another_run_is_refused(state, config, tmp_path):
    write_at(state, config, tmp_path, 1)
    for name in ("other", "tin"):
        with pytest.raises(ConfigError, match=rf"tiny-00000001\.pt is not one of `{name}`: take another --out"):
            newest(tmp_path, dataclasses.replace(config, name=name))


def test_best_weights_alone_are_not_overwritten(state, config, tmp_path):
    (tmp_path / "tiny.pt").write_bytes(b"an import, or what is left of a run")
    with pytest.raises(ConfigError, match=r"tiny\.pt would be replaced, .* take another --out or another `name`"):
        newest(tmp_path, config)
    every = config.loop.checkpoint_every_steps
    for step, is_refused in ((every, False), (2 * every, True)):
        checkpoint.save(tmp_path / "tiny.pt", config, state.model.state_dict(), results={"step": step})
        with pytest.raises(ConfigError) if is_refused else nullcontext():
            assert newest(tmp_path, config) is None  # killed before its first checkpoint
    checkpoint.save(tmp_path / "tiny.pt", config, state.model.state_dict(), results={"step": every})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2 * every, "loss": 1.0}))
    with pytest.raises(ConfigError, match="would be replaced"):  # the run went on, its first evaluation was its best
        newest(tmp_path, config)
    write_at(state, config, tmp_path, 1)
    assert newest(tmp_path, config) == tmp_path / "tiny-00000001.pt"


def test_a_name_is_no_pattern(state, config, tmp_path):
    config = dataclasses.replace(config, name="tiny [a]*")
    write_at(state, config, tmp_path, 1)
    assert newest(tmp_path, config) == tmp_path / "tiny [a]*-00000001.pt"


def test_milestones_outlive_the_newest(state, config, changed, tmp_path):
    config = changed(config, loop={"milestones": (3,), "keep_last": 2, "checkpoint_every_steps": 100})
    assert [state.checkpoint_is_due(config) for state.step in (2, 3, 12, 100)] == [False, True, True, True]
    write_at(state, config, tmp_path, 1, 2, 3, 4, 5)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["3", "4", "5"]


def test_checkpoints_may_follow_the_clock(state, config, changed, tmp_path, monkeypatch):
    assert not state.checkpoint_is_overdue(config)
    assert not state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))
    write_at(state, config, tmp_path, 1)
    assert not state.checkpoint_is_overdue(changed(config, loop={"checkpoint_every_s": 60}))


def test_what_may_change_is_logged_and_what_may_not_is_refused_by_name(state, config, changed, tmp_path, caplog):
    write_at(state, config, tmp_path, 1)
    longer = changed(config, loop={"steps": 99}, optimizer={"lr": 0.5})
    assert resume(new_state(longer, state.process), longer, tmp_path)
    assert "loop.steps: 12 -> 99" in caplog.text
    assert "optimizer.lr: 0.002 -> 0.5" in caplog.text
    dry = dataclasses.replace(config.model.stages[0], dropout=0.5)
    assert resume(state, changed(config, model={"stages": (dry, config.model.stages[1])}), tmp_path)
    wide = dataclasses.replace(config.model.stages[0], filters=32)
    other = changed(config, model={"stages": (wide, config.model.stages[1])}, loop={"seed": 5})
    with pytest.raises(ConfigError, match=r"may not change .*--out.*:\n  model\.stages\.0\.filters: 16 -> 32$"):
        resume(state, other, tmp_path)
    with pytest.raises(ConfigError, match=r"labels\.0: ' ' -> '_'"):
        resume(state, dataclasses.replace(config, labels=("_", *config.labels[1:])), tmp_path)


def test_the_best_on_other_dev_clips_is_no_bar(state, config, changed, tmp_path):
    """Wherever they lie: a manifest may move, or have other clips in its place."""
    clips = read_manifest(config.data.dev)
    dev = tmp_path / "dev.jsonl"
    write_manifest(dev, clips)
    Recognition(config).prepare(state)
    state.best_error = 0.1
    write_at(state, config, tmp_path, 1)
    for kept, best in ((clips, 0.1), (clips[1:], math.inf)):
        write_manifest(dev, kept)
        moved = changed(config, data={"dev": dev})
        later = new_state(moved, state.process)
        assert resume(later, moved, tmp_path)
        Recognition(moved).prepare(later)
        assert later.best_error == best


def test_milestones_stay_when_others_are_set(state, config, changed, tmp_path):
    config = changed(config, loop={"milestones": (1,), "keep_last": 1})
    write_at(state, config, tmp_path, 1)
    for step, milestones in ((2, (2,)), (3, ())):
        config = changed(config, loop={"milestones": milestones})
        state = new_state(config, state.process)
        assert resume(state, config, tmp_path)
        write_at(state, config, tmp_path, step)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["1", "2", "3"]


def test_what_is_written_beside_damaged_later_ones_stays(state, config, changed, tmp_path):
    config = changed(config, loop={"keep_last": 1})
    (tmp_path / "tiny-00000009.pt").write_bytes(b"damaged")
    write_at(state, config, tmp_path, 1, 2)
    assert [path.name[-4] for path in checkpoints(tmp_path, config)] == ["2", "9"]
    assert newest(tmp_path, config) == tmp_path / "tiny-00000002.pt"


def test_a_start_that_is_given_too_late_is_said_to_change_nothing(state, config, changed, tmp_path, caplog):
    write_at(state, config, tmp_path, 1)
    late = changed(config, init={"checkpoint": tmp_path / "better.pt"})
    assert resume(state, late, tmp_path)
    assert "`init.checkpoint` changes nothing in a run that is under way" in caplog.text


def test_an_average_may_be_switched_on_and_off(state, config, changed, tmp_path):
    state.average.update(1)
    write_at(state, config, tmp_path, 1)
    off = changed(config, optimizer={"ema": None})
    plain = new_state(off, state.process)
    assert resume(plain, off, tmp_path)
    assert torch.equal(plain.best_model.head.weight, state.model.head.weight)
    write_at(plain, off, tmp_path, 2)
    again = new_state(config, state.process)
    assert resume(again, config, tmp_path)
    assert torch.equal(again.average.model.head.weight, plain.model.head.weight)


@pytest.mark.parametrize(
    ("part", "other"), [("text", "other words"), ("duration", 0.9), ("offset", 0.1), ("audio_filepath", "copy.wav")]
)
def test_corrected_clips_are_other_dev_clips(state, config, changed, tmp_path, caplog, part, other):
    first, *rest = read_manifest(config.data.dev)
    first = dataclasses.replace(first, offset=0.0, duration=1.0)
    shutil.copy(first.audio_filepath, tmp_path / "copy.wav")
    corrected = changed(config, data={"dev": tmp_path / "dev.jsonl"})
    write_manifest(corrected.data.dev, [first, *rest])
    Recognition(corrected).prepare(state)
    state.best_error = 0.1
    Recognition(corrected).prepare(state)
    assert state.best_error == 0.1
    change = {part: tmp_path / other if part == "audio_filepath" else other}
    write_manifest(corrected.data.dev, [dataclasses.replace(first, **change), *rest])
    Recognition(corrected).prepare(state)
    assert state.best_error == math.inf
    assert "`data.dev` has other clips than before" in caplog.text


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"name": "novograd"}}, r"optimizer\.name: 'adamw' -> 'novograd'$"),
        ({"init": {"stage_lr_decay": 0.5}}, r"init\.stage_lr_decay: 1\.0 -> 0\.5$"),
        ({"features": {"edges": "zero"}}, r"features\.edges: 'reflect' -> 'zero'$"),
    ],
)
def test_what_the_weights_and_moments_would_not_fit_may_not_change(state, config, changed, tmp_path, sections, message):
    write_at(state, config, tmp_path, 1)
    with pytest.raises(ConfigError, match=rf"these may not change .*:\n  {message}"):
        resume(state, changed(config, **sections), tmp_path)


def test_what_changes_of_the_optimiser_holds_from_there_on(state, config, changed, tmp_path):
    write_at(state, config, tmp_path, 1)
    other = changed(config, optimizer={"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6})
    later = new_state(other, state.process)
    assert resume(later, other, tmp_path)
    decayed, plain = later.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {(group["betas"], group["eps"]) for group in (decayed, plain)} == {((0.8, 0.95), 1e-6)}


def test_a_resumed_run_goes_on_counting_what_it_skipped(state, config, changed, tmp_path):
    config = changed(config, loop={"precision": "fp16"})
    state = new_state(config, state.process)
    state.skipped_clips, state.skipped_steps, state.skipped_in_a_row, state.best_error = 5, 4, 3, 0.25
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    state.scaler.scale(torch.ones(()))  # which makes its scale
    write_at(state, config, tmp_path, 1)
    later = new_state(config, state.process)
    assert resume(later, config, tmp_path)
    assert (later.skipped_clips, later.skipped_steps, later.skipped_in_a_row) == (5, 4, 3)
    assert (later.best_error, later.scaler.get_scale()) == (0.25, 2.0**7)


def test_the_best_weights_are_the_average(whole):
    best, last = (checkpoint.load(whole / name)[1] for name in ("tiny.pt", "tiny-00000012.pt"))
    assert best["results"]["step"] == 12
    assert all(torch.equal(best["weights"][name], tensor) for name, tensor in last["weights"].items())
    assert not torch.equal(best["weights"]["head.weight"], last["training"]["weights"]["head.weight"])


def test_a_worse_evaluation_leaves_the_best_weights_as_they_are(state, config, tmp_path):
    errors, kept = {1: 0.3, 2: 0.5, 3: 0.2, 4: 0.2, 5: 0.4}, []

    class Rated:
        def evaluate(self, state, report):
            return Finding({"step": state.step}, errors[state.step])

    for state.step in errors:
        train.evaluate_and_keep_best(state, Rated(), config, tmp_path, None)
        kept.append(checkpoint.load(tmp_path / "tiny.pt")[1]["results"]["step"])
    assert kept == [1, 1, 3, 3, 3]
    assert (state.best_error, state.evaluated_step) == (0.2, 5)
