import dataclasses
import logging
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.cli import main
from carnelian_training.config import ManifestConfig, NoiseConfig, ReverberationConfig, config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.data.manifest import read_manifest, write_manifest
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.loop import recognition
from carnelian_training.loop.metrics import error_of, read_metrics
from carnelian_training.loop.recognition import read_training_clips
from carnelian_training.loop.train import train


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def test_bad_clips_neither_stop_nor_poison_a_run_and_it_resumes_exactly(tiny_config, changed, bad_clips, tmp_path):
    good = read_manifest(tiny_config.data.dev)
    write_manifest(tmp_path / "mixed.jsonl", [*good, *bad_clips.values()])
    manifest = ManifestConfig(path=tmp_path / "mixed.jsonl")
    config = changed(tiny_config, data={"train": (manifest,), "batch_s": 4})
    train(config, tmp_path / "whole")
    assert np.isfinite(losses(tmp_path / "whole")).all()
    train(config, tmp_path / "parts")
    (tmp_path / "parts" / "tiny-00000006.pt").unlink()
    (tmp_path / "parts" / "metrics.jsonl").unlink()
    train(config, tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[3:]
    records = read_metrics(tmp_path / "parts" / "metrics.jsonl")
    assert records[-2]["skipped_clips"] > 0
    weights = checkpoint.load(tmp_path / "parts" / "tiny-00000006.pt")[1]["weights"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["fails", "is killed"])
def test_an_evaluation_that_ends_between_checkpoints_costs_no_training(
    tiny_config, changed, tmp_path, monkeypatch, error
):
    def evaluate_once(*arguments):
        if (tmp_path / "tiny.pt").exists():
            raise error  # a KeyboardInterrupt is passed on as it is: nothing else runs after it than after a kill
        return evaluate(*arguments)

    monkeypatch.setattr("carnelian_training.loop.recognition.evaluate", evaluate_once)
    with pytest.raises(error):
        train(changed(tiny_config, loop={"steps": 9, "checkpoint_every_steps": 1000}), tmp_path)
    evaluated = {
        path.name: checkpoint.load(path)[1]["training"]["evaluated_step"] for path in tmp_path.glob("tiny-*.pt")
    }
    assert evaluated == {"tiny-00000003.pt": 3, "tiny-00000006.pt": 3}


def test_an_evaluation_that_fails_costs_no_training_and_is_made_up_for(tiny_config, changed, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("a dev clip went away")

    config = changed(tiny_config, loop={"steps": 3})
    with monkeypatch.context() as failing:
        failing.setattr("carnelian_training.loop.recognition.evaluate", fail)
        with pytest.raises(RuntimeError, match="went away"):
            train(config, tmp_path)
    (saved,) = tmp_path.glob("*.pt")
    assert checkpoint.load(saved)[1]["results"]["step"] == config.loop.steps
    train(config, tmp_path)
    assert checkpoint.load(tmp_path / "tiny.pt")[1]["results"]["step"] == config.loop.steps
    train(config, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if "dev_wer" in record] == [3]


@pytest.fixture
def killed(tiny_config, tmp_path, monkeypatch):
    """The folder of a run that was killed during its first evaluation."""

    def kill(*_):
        raise KeyboardInterrupt  # nothing else runs after it than after a kill

    with monkeypatch.context() as killing:
        killing.setattr("carnelian_training.loop.recognition.evaluate", kill)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config, tmp_path)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["tiny-00000003.pt"]
    return tmp_path


def test_a_kill_during_an_evaluation_costs_no_training(tiny_config, changed, killed):
    train(changed(tiny_config, loop={"steps": 3}), killed)  # begins with that evaluation
    assert checkpoint.load(killed / "tiny.pt")[1]["results"]["step"] == 3


def test_throughput_leaves_out_an_evaluation_that_is_made_up_for(tiny_config, killed, monkeypatch):
    clock = time.perf_counter
    hours: list[int] = []

    def evaluate_for_an_hour(*arguments):
        hours.append(1)
        return evaluate(*arguments)

    monkeypatch.setattr("carnelian_training.loop.recognition.evaluate", evaluate_for_an_hour)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * sum(hours))
    train(tiny_config, killed)
    assert len(hours) == 2
    rates = [record["audio_s_per_s"] for record in read_metrics(killed / "metrics.jsonl") if "loss" in record]
    assert min(rates) > tiny_config.data.batch_s / 3600


def test_a_checkpoint_knows_the_evaluation_after_its_step(tiny_config, tmp_path):
    train(tiny_config, tmp_path)
    best = checkpoint.load(tmp_path / "tiny.pt")[1]["results"]
    for step in (3, 6):
        training = checkpoint.load(tmp_path / f"tiny-{step:08d}.pt")[1]["training"]
        assert training["evaluated_step"] == step
    assert training["best_error"] == error_of(best)


def test_a_best_that_could_not_be_written_is_no_bar(tiny_config, tmp_path, monkeypatch):
    save = checkpoint.save

    def fail(path, *arguments, **named):
        if path.name == "tiny.pt":
            raise OSError("no space left on device")
        save(path, *arguments, **named)

    with monkeypatch.context() as failing:
        failing.setattr(checkpoint, "save", fail)
        with pytest.raises(OSError, match="no space"):
            train(tiny_config, tmp_path)
    train(tiny_config, tmp_path)
    assert (tmp_path / "tiny.pt").exists()


def test_the_best_weights_have_the_least_wer_and_then_cer():
    first, second = {"dev_wer": 1.0, "dev_cer": 0.9}, {"dev_wer": 1.0, "dev_cer": 0.2}
    assert error_of(second) < error_of(first)
    assert error_of({"dev_wer": 0.4, "dev_cer": 0.9}) < error_of({"dev_wer": 0.4001, "dev_cer": 0.1})
    assert error_of({"dev_cer": 0.1}) < error_of({"dev_cer": 0.2})


def test_an_epoch_of_bad_clips_alone_ends_the_run(tiny_config, changed, bad_clips, tmp_path):
    write_manifest(tmp_path / "bad.jsonl", bad_clips.values())
    config = changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "bad.jsonl"),)})
    with pytest.raises(RuntimeError, match="one clip at least must be usable"):
        train(config, tmp_path / "run")


def test_bad_dev_clips_end_a_run_before_it_begins(tiny_config, changed, bad_clips, tmp_path):
    write_manifest(tmp_path / "dev.jsonl", [*read_manifest(tiny_config.data.dev), *bad_clips.values()])
    with pytest.raises(RuntimeError, match=r"dev\.jsonl must name clean clips, but 10 of 19 are bad") as error:
        train(changed(tiny_config, data={"dev": tmp_path / "dev.jsonl"}), tmp_path / "run")
    assert "truncated.wav: " in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_dev_manifest_is_looked_at_before_any_step_of_a_resumed_run_too(tiny_config, changed, tmp_path):
    train(changed(tiny_config, loop={"steps": 1}), tmp_path / "run")
    (tmp_path / "empty.jsonl").touch()
    longer = changed(tiny_config, loop={"steps": 4})
    for folder in ("run", "new"):
        with pytest.raises(ValueError, match=r"at least one clip, but .*empty\.jsonl has none"):
            train(changed(longer, data={"dev": tmp_path / "empty.jsonl"}), tmp_path / folder)
    assert len(losses(tmp_path / "run")) == 1
    assert not (tmp_path / "new").exists()


def test_a_run_with_other_labels_is_not_resumed_and_its_clips_are_not_judged_by_them(tiny_config, changed, tmp_path):
    train(changed(tiny_config, loop={"steps": 1}), tmp_path)
    other = dataclasses.replace(tiny_config, labels=("_", "~"))  # none of the clips can be written in them
    with pytest.raises(ConfigError, match=r"may not change .*:\n  labels\.0: .* -> '_'\n"):
        train(other, tmp_path)


def test_clips_are_read_only_for_a_run_that_goes_on(tiny_config, changed, tmp_path, monkeypatch, caplog):
    """Of millions, reading takes minutes, which a mistake or nothing to do must not wait for."""
    train(changed(tiny_config, loop={"steps": 1}), tmp_path)
    monkeypatch.setattr(recognition, "read_training_clips", lambda config: pytest.fail("reads the clips"))
    with pytest.raises(ConfigError, match="may not change"):
        train(dataclasses.replace(tiny_config, labels=("_", "~")), tmp_path)
    with caplog.at_level(logging.INFO):
        train(changed(tiny_config, loop={"steps": 1}), tmp_path)
    assert "nothing to do" in caplog.text


def test_all_that_is_not_there_is_named_at_once_before_anything_is_written(tiny_config, changed, tmp_path):
    config = changed(
        tiny_config,
        data={"train": (*tiny_config.data.train, ManifestConfig(path=Path("a.jsonl"))), "dev": tmp_path / "b.jsonl"},
        augment={"noise": NoiseConfig(path=Path("c")), "reverberation": ReverberationConfig(path=tmp_path)},
    )
    expected = (
        f"these must be there, but are not (a relative path begins at {Path.cwd()}):\n  data.train.1.path: a.jsonl\n"
        f"  data.dev: {tmp_path / 'b.jsonl'}\n  augment.noise.path: c"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_files", [2, 1])
def test_a_training_manifest_whose_files_are_elsewhere_ends_a_run_at_once(tiny_config, changed, tmp_path, num_files):
    path = tmp_path / "moved" / "train.jsonl"
    path.parent.mkdir()
    clips = read_manifest(tiny_config.data.dev)[:2]
    files = [path.parent / "clips" / clip.audio_filepath.name for clip in clips[:num_files]]
    write_manifest(
        path, [dataclasses.replace(clip, audio_filepath=files[i % num_files]) for i, clip in enumerate(clips)]
    )
    train_on = (*tiny_config.data.train, ManifestConfig(path=path))
    with pytest.raises(
        ValueError, match=rf"`data\.train\.1\.path`: .* first {num_files} none is, such as .*moved/clips/"
    ):
        train(changed(tiny_config, data={"train": train_on}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_epoch_has_the_usable_clips_of_each_manifest_as_often_as_it_says(tiny_config, changed, tmp_path, caplog):
    first, second, *_ = read_manifest(tiny_config.data.dev)
    too_long = dataclasses.replace(first, duration=99.0)
    write_manifest(tmp_path / "once.jsonl", [first, too_long])
    write_manifest(tmp_path / "twice.jsonl", [second, too_long, too_long])
    manifests = (ManifestConfig(path=tmp_path / "once.jsonl"), ManifestConfig(path=tmp_path / "twice.jsonl", repeat=2))
    clips = read_training_clips(changed(tiny_config, data={"train": manifests}))
    assert [clip.audio_filepath for clip in clips] == [clip.audio_filepath for clip in (first, second, second)]
    for warning in ("1 of 2 clips of .*once", "2 of 3 clips of .*twice"):
        assert len(re.findall(rf"left out {warning}\.jsonl: duration", caplog.text)) == 1


def test_a_run_says_first_what_it_learns_from(tiny_config, changed, tmp_path, caplog):
    clips = read_manifest(tiny_config.data.dev)
    manifest = ManifestConfig(path=tiny_config.data.dev, repeat=3)
    config = changed(tiny_config, data={"train": (manifest,)}, loop={"steps": 1, "log_every_steps": 50})
    with caplog.at_level(logging.INFO):
        train(config, tmp_path / "run")
    hours = 3 * sum(clip.duration for clip in clips) / 3600
    expected = f"{3 * len(clips)} clips an epoch, {hours:.3g} hours; a line of figures every 50 steps"
    assert caplog.messages[0] == expected


def test_missing_files_of_clips_that_are_left_out_anyway_do_not_end_a_run(tiny_config, changed, tmp_path):
    here = read_manifest(tiny_config.data.dev)
    too_long = [dataclasses.replace(here[0], audio_filepath=tmp_path / f"{i}.wav", duration=99.0) for i in range(100)]
    write_manifest(tmp_path / "train.jsonl", [*too_long, *here])
    config = changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "train.jsonl"),)}, loop={"steps": 1})
    train(config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 1


def test_segments_of_one_recording_that_is_missing_are_left_out(tiny_config, changed, tmp_path):
    here = read_manifest(tiny_config.data.dev)
    segments = [
        dataclasses.replace(here[0], audio_filepath=tmp_path / "absent.wav", offset=float(i)) for i in range(100)
    ]
    write_manifest(tmp_path / "train.jsonl", [*segments, *here])
    config = changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "train.jsonl"),)}, loop={"steps": 1})
    train(config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 1


def test_a_folder_without_noises_ends_a_run_before_it_writes_anything(tiny_config, changed, tmp_path):
    (tmp_path / "none").mkdir()
    config = changed(tiny_config, augment={"noise": NoiseConfig(path=tmp_path / "none")})
    with pytest.raises(ConfigError, match="none must hold sound files"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_run_is_no_file(tmp_path, call):
    for name in ("tiny.yaml", "run"):
        (tmp_path / name).touch()
    status, _, err = call(main, "fit", tmp_path / "tiny.yaml", "--out", tmp_path / "run")
    assert status == 2
    assert "is a file" in " ".join(err.replace("│", " ").split())


def test_without_a_dev_manifest_the_last_weights_are_kept_and_the_log_says_so(tiny_config, changed, tmp_path, caplog):
    train(changed(tiny_config, data={"dev": None}), tmp_path)
    assert "`data.dev` is null: tiny.pt will be the last weights, not the best" in caplog.text
    last, kept = (checkpoint.load(tmp_path / name)[1] for name in ("tiny-00000006.pt", "tiny.pt"))
    assert kept["results"] == {"step": 6}
    assert kept["training"] is None
    assert all(torch.equal(tensor, kept["weights"][name]) for name, tensor in last["weights"].items())


def test_a_bad_clip_is_named_once_and_counted_in_every_epoch(tiny_config, changed, bad_clips, tmp_path, caplog):
    write_manifest(tmp_path / "mixed.jsonl", [*read_manifest(tiny_config.data.dev), bad_clips["text"]])
    config = changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "mixed.jsonl"),), "batch_s": 100})
    train(changed(config, loop={"steps": 3, "evaluate_every_steps": 3, "log_every_steps": 1}), tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["skipped_clips"] for record in records if "loss" in record] == [1, 2, 3]
    assert caplog.text.count("text.wav: ") == 1


def test_the_loss_falls(tiny_config, changed, tmp_path):
    config = changed(tiny_config, optimizer={"lr": 0.02}, loop={"steps": 40, "evaluate_every_steps": 40})
    train(config, tmp_path)
    assert losses(tmp_path)[-1] < 0.5 * losses(tmp_path)[0]


def test_only_the_newest_checkpoints_are_kept_beside_the_best(tiny_config, changed, tmp_path):
    train(changed(tiny_config, loop={"evaluate_every_steps": 1, "keep_last": 2}), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["tiny-00000005.pt", "tiny-00000006.pt", "tiny.pt"]


def test_a_network_that_no_command_would_load_is_not_trained(tiny_config, changed, tmp_path):
    config = changed(tiny_config, model={"stages": (dataclasses.replace(tiny_config.model.stages[1], repeat=501),)})
    with pytest.raises(ValueError, match="`model` of tiny must describe a network of 500 layers at most"):
        train(config, tmp_path / "run")


def test_nothing_to_train_on_is_an_error(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="manifests with usable clips, but they have none"):
        train(dataclasses.replace(tiny_config, labels=("x",)), tmp_path)


def test_no_manifest_to_train_on_is_an_error_of_its_own(tiny_config, changed, tmp_path):
    with pytest.raises(ValueError, match=r"^`data\.train` must name manifests, .* but is empty$"):
        train(changed(tiny_config, data={"train": ()}), tmp_path)


def test_an_empty_manifest_cannot_be_trained_on(tiny_config, changed, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    config = changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "empty.jsonl"),)})
    with pytest.raises(ValueError, match="manifests with usable clips, but they have none"):
        train(config, tmp_path / "run")


def test_an_empty_manifest_cannot_be_evaluated(tiny_config, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"at least one clip, but .*empty\.jsonl"):
        evaluate(checkpoint.build_model(tiny_config), tiny_config, tmp_path / "empty.jsonl")


def test_a_finished_run_stays_as_it_is(tiny_config, changed, tmp_path):
    config = changed(tiny_config, loop={"evaluate_every_steps": 1, "log_every_steps": 1})
    train(config, tmp_path)
    before = sorted(path.name for path in tmp_path.glob("*.pt")), losses(tmp_path)
    train(config, tmp_path)
    assert (sorted(path.name for path in tmp_path.glob("*.pt")), losses(tmp_path)) == before


def test_a_run_is_not_lost_to_what_is_made_of_it(tiny_config, tmp_path):
    """A checkpoint that resumes would be one that does not."""
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        checkpoint.save(path, tiny_config, checkpoint.build_model(tiny_config).state_dict(), results={})
    before = [path.read_bytes() for path in paths]
    with pytest.raises(ValueError, match=r"must be another file than the source, .* is .*a\.pt"):
        checkpoint.publish(paths[0], tmp_path / "." / "a.pt")
    with pytest.raises(ValueError, match=r"must be another file than the source, .* is .*b\.pt"):
        checkpoint.average(paths, paths[1])
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["fit"], 2), (["fit", "absent.yaml", "--out", "x"], 1), (["nonsense"], 2)],
)
def test_exit_status(call, arguments, status):
    assert call(main, *arguments)[0] == status


def test_an_error_is_one_line_that_begins_with_the_commands_name(call):
    assert call(main, "fit", "absent.yaml", "--out", "x")[2].startswith("carnelian-train: absent.yaml: ")


@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of how it uses itself
def test_a_compiled_network_learns_from_few_clips_at_a_time(tiny_config, changed, tmp_path):
    """The views that are faster on CPUs are of sizes that TorchInductor does not know."""
    plain = changed(tiny_config, loop={"steps": 1})
    train(plain, tmp_path / "plain")
    train(changed(plain, loop={"compile": True}), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


@pytest.mark.parametrize(
    "model",
    [{"name": "jasper", "stages": [{"filters": 8, "kernel": 3}]}, {"name": "wav2vec2"}],
    ids=["jasper", "wav2vec2"],
)
def test_what_cannot_be_compiled_on_a_cpu_is_refused_before_its_data_is_read(model, tmp_path):
    config = config_from_dict({"name": "tiny", "model": model, "loop": {"compile": True}}, "here")
    with pytest.raises(ConfigError, match=rf"`loop\.compile` must be false for {model['name']} on a CPU"):
        train(config, tmp_path)  # without `data.train`
