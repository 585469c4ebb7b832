"""Runs that were interrupted, and what may change before they go on."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.cli import main
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import read_manifest, write_manifest
from carnelian_training.loop import train
from carnelian_training.loop.metrics import read_metrics
from carnelian_training.loop.recognition import Recognition
from carnelian_training.loop.report import Report
from carnelian_training.loop.run_checkpoints import checkpoints, resume
from carnelian_training.loop.state import new_state
from carnelian_training.loop.task import Finding


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train.train(config, folder)
    return folder


def losses(folder) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record}


def assert_same_end(one, other):
    assert losses(one) == losses(other)
    first, second = (checkpoint.load(folder / "tiny-00000012.pt")[1] for folder in (one, other))
    for name, weights in first["weights"].items():
        assert torch.equal(weights, second["weights"][name]), name
        assert torch.equal(first["training"]["weights"][name], second["training"]["weights"][name]), name
    moments = [content["training"]["optimizer"]["state"] for content in (first, second)]
    for index, moment in moments[0].items():
        assert all(torch.equal(value, moments[1][index][name]) for name, value in moment.items())


def test_a_killed_run_goes_on_to_the_bit(config, whole, tmp_path, fit_until_killed, wait_until):
    command = [sys.executable, *fit_until_killed(config, tmp_path / "parts")]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: run.poll() is not None or checkpoints(tmp_path / "parts", config), timeout_s=300)
        time.sleep(random.uniform(0, 0.3))
    finally:
        run.kill()
        _, log = run.communicate()
    assert run.returncode == -signal.SIGKILL, log
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
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as stopped:
        train.train(config, tmp_path / "parts")
    assert number == signal.SIGINT or stopped.value.code == 128 + number
    assert f"stopped by {number.name} after step 5" in caplog.text
    assert checkpoints(tmp_path / "parts", config)[-1].name == "tiny-00000005.pt"
    assert signal.getsignal(number) is handler
    train.train(config, tmp_path / "parts")
    assert_same_end(whole, tmp_path / "parts")


def test_ctrl_c_ends_the_command_with_its_own_status(config, tmp_path, monkeypatch, call):
    optimise = train.optimise
    monkeypatch.setattr(train, "optimise", lambda *step: (os.kill(os.getpid(), signal.SIGINT), optimise(*step))[1])
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config_to_dict(config)))
    status, printed, err = call(main, "fit", path, "--out", tmp_path / "run")
    assert (status, printed) == (130, "")
    assert "stopped by SIGINT after step 1; the same command goes on from there" in err
    assert "Traceback" not in err


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


def test_what_may_change_is_logged_and_what_may_not_is_refused_by_name(
    state, config, changed, tmp_path, caplog, write_at
):
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


def test_the_best_on_other_dev_clips_is_no_bar(state, config, changed, tmp_path, write_at):
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


def test_a_run_without_its_dev_clips_forgets_its_best(state, config, changed, caplog):
    """The last weights take the place of the best ones, so that the first evaluation after them counts again."""
    Recognition(config).prepare(state)
    state.best_error = 0.1
    Recognition(changed(config, data={"dev": None})).prepare(state)
    assert "`data.dev` is null: tiny.pt will be the last weights" in caplog.text
    Recognition(config).prepare(state)
    assert state.best_error == math.inf
    assert "chosen anew" not in caplog.text


def test_a_start_that_is_given_too_late_is_said_to_change_nothing(state, config, changed, tmp_path, caplog, write_at):
    write_at(state, config, tmp_path, 1)
    late = changed(config, init={"checkpoint": tmp_path / "better.pt"})
    assert resume(state, late, tmp_path)
    assert "`init.checkpoint` changes nothing in a run that is under way" in caplog.text


def test_an_average_may_be_switched_on_and_off(state, config, changed, tmp_path, write_at):
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
def test_what_the_weights_and_moments_would_not_fit_may_not_change(
    state, config, changed, tmp_path, sections, message, write_at
):
    write_at(state, config, tmp_path, 1)
    with pytest.raises(ConfigError, match=rf"these may not change .*:\n  {message}"):
        resume(state, changed(config, **sections), tmp_path)


def test_what_changes_of_the_optimiser_holds_from_there_on(state, config, changed, tmp_path, write_at):
    write_at(state, config, tmp_path, 1)
    other = changed(config, optimizer={"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6})
    later = new_state(other, state.process)
    assert resume(later, other, tmp_path)
    decayed, plain = later.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {(group["betas"], group["eps"]) for group in (decayed, plain)} == {((0.8, 0.95), 1e-6)}


def test_a_resumed_run_goes_on_counting_what_it_skipped(state, config, changed, tmp_path, write_at):
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


@pytest.mark.parametrize(
    ("errors", "best_steps"),
    [((0.3, 0.5, 0.2, 0.2, 0.4), [1, 1, 3, 3, 3]), ((math.nan, 0.3, 0.2, math.nan, 0.4), [1, 2, 3, 3, 3])],
    ids=["numbers", "NaN, which would be the best for ever"],
)
def test_a_worse_evaluation_leaves_the_best_weights_as_they_are(state, config, tmp_path, errors, best_steps):
    class Rated:
        def evaluate(self, state, report):
            return Finding({"step": state.step}, errors[state.step - 1])

    kept = []
    for state.step in range(1, 6):
        train.evaluate(state, Rated(), config, tmp_path, Report(tmp_path, config, state.step, enabled=False))
        kept.append(checkpoint.load(tmp_path / "tiny.pt")[1]["results"]["step"])
    assert kept == best_steps
    assert (state.best_error, state.evaluated_step) == (0.2, 5)
