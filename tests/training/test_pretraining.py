"""Pre-training of wav2vec 2.0, through the loop that trains everything."""

import dataclasses
import json
import math
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from carnelian_training.checkpoint import build_model, build_network, load, load_model, save
from carnelian_training.config import LABELS, config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import Clip, read_manifest
from carnelian_training.data.plan import Item, crop, trainable
from carnelian_training.data.span_masks import SpanMaskConfig
from carnelian_training.distributed import Process
from carnelian_training.loop import contrastive, finetune
from carnelian_training.loop.ctc_loss import augmented
from carnelian_training.loop.metrics import read_metrics
from carnelian_training.loop.recognition import Recognition, shares
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise, train
from carnelian_training.run_config import load_config
from carnelian_training.weight_files import CheckpointError

CLIPS = Path(__file__).parents[2] / "demo" / "clips" / "manifest.jsonl"
CPU = Process(torch.device("cpu"))


@pytest.fixture(scope="module")
def config():
    """A few thousand parameters, no dropout, six clips in one step."""
    model = {"name": "wav2vec2", "conv_channels": [16, 16, 16], "conv_kernels": [10, 8, 4], "conv_strides": [8, 8, 4]}
    model |= {"width": 24, "layers": 2, "heads": 2, "feed_forward": 32, "position_kernel": 16, "position_groups": 2}
    model |= {"dropout": 0.0, "attention_dropout": 0.0}
    pretraining = {"groups": 2, "codes": 16, "code_width": 16, "width": 12, "negatives": 20, "crop_s": 3.0}
    pretraining |= {"feature_dropout": 0.0, "diversity_weight": 5.0, "temperature": [2.0, 0.5]}
    tree = {
        "name": "tiny",
        "model": model,
        "pretraining": pretraining,
        "data": {"train": [{"path": str(CLIPS)}], "dev": str(CLIPS), "batch_s": 40, "num_threads": 1},
        "augment": {"speed": [1.0, 1.0], "spans": {"time_probability": 0.5}},
        "optimizer": {"name": "adamw", "lr": 0.005, "betas": [0.9, 0.98], "warmup_steps": 2, "max_grad_norm": 25.0},
        "loop": {"steps": 4, "log_every_steps": 1, "evaluate_every_steps": 4, "checkpoint_every_steps": 2},
    }
    return config_from_dict(tree, "here")


def steps(config, count):
    state = new_state(config, CPU)
    outcomes = []
    for share in islice(shares(read_manifest(CLIPS), config, state), count):
        outcomes.append((share.parts, optimise(state, share, config)))
        state.step += 1
    return outcomes, state


def test_a_step_is_the_same_however_its_clips_are_dealt_out(config, changed):
    whole, one = steps(config, 2)
    parted, many = steps(changed(config, data={"device_batch_s": 3.0}), 2)
    assert [parts for parts, _ in whole] == [1, 1]
    assert [parts for parts, _ in parted] == [6, 6]
    for (_, first), (_, second) in zip(whole, parted, strict=True):
        assert second.loss == pytest.approx(first.loss, abs=1e-5)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
        assert second.measured == pytest.approx(first.measured, abs=2e-4)
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(many.model.state_dict()[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


def test_processes_and_parts_make_no_difference(config, changed, tmp_path, run_steps, second_process):
    # NovoGrad, for AdamW makes whole steps out of gradients that are nothing but rounding.
    config = changed(config, optimizer={"name": "novograd", "betas": (0.95, 0.0)})
    paths = [tmp_path / "whole.json", tmp_path / "parts.json"]
    paths[0].write_text(json.dumps(config_to_dict(config)))
    paths[1].write_text(json.dumps(config_to_dict(changed(config, data={"device_batch_s": 3.0}))))
    found = run_steps(3, paths)
    with second_process(Path(__file__).parent / "run_steps.py", 3, *paths) as second:
        found += run_steps(3, paths)
        assert second.communicate(timeout=60)[0] == ""  # it does not lead
        assert second.returncode == 0
    assert len(found) == 4
    for other in found[1:]:
        assert other["losses"] == pytest.approx(found[0]["losses"], abs=1e-5)


def test_the_diversity_term_has_the_gradient_of_the_whole_steps_mean():
    torch.manual_seed(0)
    logits = torch.randn(30, 2, 8, requires_grad=True)
    probabilities = logits.softmax(2)
    mean = probabilities.mean(0)
    direct = (16 - contrastive.perplexity(mean)) / 16
    (expected,) = torch.autograd.grad(direct, logits, retain_graph=True)
    value, slope = contrastive.unevenness(mean)
    assert float(value) == pytest.approx(direct.item())
    found = torch.zeros_like(logits)
    for part in torch.split(probabilities, 7):  # parts of different sizes
        found += torch.autograd.grad((part * slope).sum() / 30, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)


def test_the_losses_of_clips_have_the_gradient_of_their_diversity(config, changed):
    state = new_state(config, CPU)
    (batch,) = next(iter(shares(read_manifest(CLIPS), config, state))).batches
    network = state.prepare(config)
    parameters = list(state.model.parameters())

    def gradient(loss):
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([tensor.flatten() for tensor in found])

    def gradient_with(weight):
        weighted = changed(config, pretraining={"diversity_weight": weight})
        losses, _ = contrastive.ContrastiveObjective(state.model, weighted, 0, CPU).losses(network, batch)
        return gradient(losses.sum())

    inputs = augmented(batch, config, CPU.device)
    contrast = network(**inputs, seeds=batch.seeds, temperature=config.pretraining.temperature_at(0))
    hidden = contrast.hidden.sum()
    perplexity = contrastive.perplexity(contrast.usage.sum(0) / hidden)
    codes = config.pretraining.groups * config.pretraining.codes
    expected = gradient(100 * hidden * (codes - perplexity) / codes)
    assert expected.abs().max() > 1
    # Float32 tells numbers of 6e4, the largest here, apart by 4e-3.
    torch.testing.assert_close(gradient_with(100.0) - gradient_with(0.0), expected, atol=1e-2, rtol=1e-3)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(config, changed, tmp_path):
    config = changed(config, optimizer={"ema": 0.9}, model={"dropout": 0.1, "layer_drop": 0.3})
    train(config, tmp_path / "whole")
    train(changed(config, loop={"steps": 2}), tmp_path / "parts")
    train(config, tmp_path / "parts")
    records = [
        [
            {name: value for name, value in record.items() if not name.endswith("_per_s")}
            for record in read_metrics(tmp_path / run / "metrics.jsonl")
        ]
        for run in ("whole", "parts")
    ]
    assert records[0] == [record for record in records[1] if record["step"] != 2 or "loss" in record]
    whole, parts = (load(tmp_path / run / "tiny-00000004.pt")[1]["weights"] for run in ("whole", "parts"))
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), name
    logged = {name for record in records[0] for name in record}
    assert {"accuracy", "perplexity", "codes_used", "contrastive_loss", "temperature", "dev_accuracy"} <= logged
    with pytest.raises(CheckpointError, match="knows no letters yet"):
        load_model(tmp_path / "whole" / "tiny.pt")


def test_a_run_that_pre_trains_goes_on_pre_training(config, changed, tmp_path):
    once = changed(config, loop={"steps": 1})
    train(once, tmp_path)
    with pytest.raises(ConfigError, match="cannot be resumed, for `pretraining` may not go: take another --out"):
        train(dataclasses.replace(once, pretraining=None), tmp_path)
    more = config.pretraining.codes * 2
    with pytest.raises(ConfigError, match=rf"may not change .*:\n  pretraining\.codes: {more // 2} -> {more}$"):
        train(changed(once, pretraining={"codes": more}), tmp_path)


def test_fine_tuning_starts_from_the_body(config, changed, tmp_path):
    train(changed(config, loop={"steps": 1, "evaluate_every_steps": 1}), tmp_path)
    tree = config_to_dict(config) | {"pretraining": None}
    tree["init"] = {"checkpoint": str(tmp_path / "tiny.pt"), "freeze": [{"stages": "body", "until_step": 2}]}
    tuned = config_from_dict(tree, "here")
    model = build_model(tuned)
    head = model.head.weight.clone()
    finetune.start_from_checkpoint(model, tuned)
    weights = load(tmp_path / "tiny.pt")[1]["weights"]
    assert torch.equal(model.head.weight, head)
    for name, tensor in model.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, weights[name]), name
    finetune.freeze(model, tuned, 0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    finetune.freeze(model, tuned, 2)
    assert all(p.requires_grad for p in model.parameters())


def test_transcripts_are_not_read(config):
    clips = [Clip(Path("a.wav"), 5.0, ""), Clip(Path("b.wav"), 5.0, "Ünlesbar 123" * 99), Clip(Path("c.wav"), 0.1, "")]
    assert trainable(clips, config, Path("some.jsonl")) == clips[:2]


def test_a_clip_too_short_for_a_frame_is_left_out(config, changed, caplog):
    clip = Clip(Path("a.wav"), 0.01, "")
    assert trainable([clip], changed(config, data={"min_duration_s": 0.0}), Path("some.jsonl")) == []
    assert "left out 1 of 1 clips of some.jsonl: too short for an output frame" in caplog.text


def test_long_clips_are_cropped_at_random():
    rng = random.Random(1)
    clip = Clip(Path("a.wav"), 10.0, "", offset=2.0)
    assert crop(Item(clip), 15.0, rng).clip == clip
    crops = [crop(Item(clip, speed=1.25), 4.0, rng) for _ in range(50)]
    assert {item.duration_s for item in crops} == {4.0}
    assert {item.title for item in crops} == {"a.wav at 2 s"}
    offsets = [item.clip.offset for item in crops]
    assert min(offsets) < 3.0
    assert 6.0 < max(offsets) <= 7.0  # 5 s of the file, which begin within it at most 5 s after its own beginning


def test_pretraining_needs_wav2vec2_and_hidden_frames(config, tiny_config):
    for tree in (config_to_dict(config) | {"augment": {}}, config_to_dict(tiny_config) | {"pretraining": {}}):
        with pytest.raises(ConfigError, match=r"`pretraining` must come with `model\.name: wav2vec2`"):
            config_from_dict(tree, "here")


def test_evaluation_does_not_depend_on_the_batch(config, changed):
    state = new_state(config, CPU)
    one = contrastive.evaluate(state.model, config, CLIPS, CPU)
    other = contrastive.evaluate(state.model, changed(config, data={"device_batch_s": 5.0}), CLIPS, CPU)
    assert one == pytest.approx(other, abs=2e-4)
    assert 0 <= one["dev_accuracy"] <= 1
    assert 1 <= one["dev_codes_used"] <= config.pretraining.groups * config.pretraining.codes


def test_a_quantiser_that_knows_one_code_is_rated_0(config):
    model = new_state(config, CPU).model
    quantiser = model.pretraining["quantiser"]
    torch.nn.init.zeros_(quantiser.choose.weight)
    found = contrastive.evaluate(model, config, CLIPS, CPU)
    assert (found["dev_codes_used"], found["dev_accuracy"]) == (config.pretraining.groups, 0.0)


def test_an_evaluation_takes_what_a_laptop_can_however_large_steps_are(config, changed, monkeypatch):
    clips = [Clip(Path(f"{i}.wav"), 10.0, "") for i in range(200)]
    planned = []
    monkeypatch.setattr(contrastive, "read_clips", lambda manifest: clips)
    monkeypatch.setattr(contrastive, "load", lambda batches, *_, **__: planned.extend(batches) or iter(()))
    contrastive.evaluate(new_state(config, CPU).model, changed(config, data={"batch_s": 5600}), CLIPS, CPU)
    assert max(map(len, planned)) == 60


def test_training_is_noisy_and_evaluation_is_not(config):
    state = new_state(config, CPU)
    (batch,) = next(iter(shares(read_manifest(CLIPS), config, state))).batches
    inputs = augmented(batch, config, CPU.device) | {"seeds": batch.seeds}
    noisy = state.model.train()(**inputs, temperature=2.0).loss  # without dropout
    state.model.eval()
    hot, cold = (state.model(**inputs, temperature=temperature).loss for temperature in (2.0, 0.5))
    assert torch.equal(hot, cold)  # the temperature is that of the noise
    assert not torch.allclose(noisy, hot, rtol=1e-3)


def test_a_clip_gives_the_same_in_any_company(config):
    model = new_state(config, CPU).model.eval()
    lengths = torch.tensor([8000, 5200])
    features = torch.randn(2, 1, 8000, generator=torch.Generator().manual_seed(1))
    ends = [config.model.output_frames(samples) for samples in lengths.tolist()]
    positions = torch.arange(ends[0])
    hidden = (positions % 3 != 1) & (positions < torch.tensor(ends)[:, None])
    both = model(features, lengths, hidden, seeds=[1, 2])
    alone = model(features[1:, :, :5200], lengths[1:], hidden[1:, : ends[1]], seeds=[2])
    for name, together, apart in zip(both._fields, both, alone, strict=True):
        torch.testing.assert_close(together[1:], apart, atol=1e-4, rtol=1e-4, msg=name)


def test_the_loss_follows_the_temperature_and_the_penalty_of_each_clips_hidden_frames(config, changed):
    config = changed(config, pretraining={"diversity_weight": 0.0, "temperature_decay": 0.5})
    state = new_state(config, CPU)
    (batch,) = next(iter(shares(read_manifest(CLIPS), config, state))).batches
    network = state.prepare(config)

    def losses(step, penalty_weight):
        weighted = changed(config, pretraining={"penalty_weight": penalty_weight})
        return contrastive.ContrastiveObjective(state.model, weighted, step, CPU).losses(network, batch)[0]

    for step in (0, 1):
        temperature = config.pretraining.temperature_at(step)
        contrast = network(**augmented(batch, config, CPU.device), seeds=batch.seeds, temperature=temperature)
        torch.testing.assert_close(losses(step, 0.0), contrast.loss)
        torch.testing.assert_close(losses(step, 3.0), contrast.loss + 3.0 * contrast.penalty * contrast.hidden)
    assert not torch.equal(losses(0, 0.0), losses(1, 0.0))


def test_dropout_differs_by_seed_step_process_and_part(config, changed):
    model, drawn = new_state(config, CPU).model, []
    for seed, step, rank, part in [(1, 0, 0, 1), (2, 0, 0, 1), (1, 1, 0, 1), (1, 0, 1, 1), (1, 0, 0, 2), (1, 0, 0, 1)]:
        seeded = changed(config, loop={"seed": seed})
        contrastive.ContrastiveObjective(model, seeded, step, Process(CPU.device, rank, 2))._seed(part)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == 5


def test_evaluation_draws_nothing_but_negatives(config, changed):
    config = changed(config, pretraining={"feature_dropout": 0.5})
    model = new_state(config, CPU).model
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(contrastive.evaluate(model.train(), config, CLIPS, CPU))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "other",
    [{"pretraining": {"negatives": 7}}, {"augment": {"spans": SpanMaskConfig(time_probability=0.6)}}],
    ids=["negatives", "spans"],
)
def test_accuracies_at_other_tasks_do_not_compare(config, changed, caplog, other):
    """With fewer negatives accuracy is higher, and the weights of an easier task would stay the best for ever."""
    state = new_state(config, CPU)
    Recognition(config).prepare(state)
    state.best_error = 0.1
    Recognition(config).prepare(state)
    assert state.best_error == 0.1
    Recognition(changed(config, **other)).prepare(state)
    assert state.best_error == math.inf
    assert "or `augment.spans` or `pretraining.negatives` has changed: the best weights are chosen anew" in caplog.text


def test_the_use_of_codes_is_measured_with_the_dropout_that_the_step_has(config, changed):
    config = changed(config, pretraining={"feature_dropout": 0.5}, data={"device_batch_s": 6.0})
    state = new_state(config, CPU)
    share = next(iter(shares(read_manifest(CLIPS), config, state)))
    network = state.prepare(config)
    objective = contrastive.ContrastiveObjective(state.model, config, 0, CPU)
    batches = list(objective.batches(share.batches, share.parts))
    assert len(batches) == share.parts > 1
    for batch in batches:
        objective.losses(network, batch)
    _, _, hidden, *codes = objective.sums
    usage = torch.stack(codes[: objective.mean_usage.numel()]).view_as(objective.mean_usage)
    torch.testing.assert_close(usage / hidden, objective.mean_usage)


def test_fine_tuning_takes_no_labels_from_pre_training(config, tmp_path):
    """It read no transcripts, whatever its configuration says of labels."""
    save(tmp_path / "pre.pt", dataclasses.replace(config, labels=("x",)), {}, results={})
    (tmp_path / "fine.yaml").write_text(f"name: fine\ninit: {{checkpoint: {tmp_path / 'pre.pt'}}}\n")
    tuned = load_config(tmp_path / "fine.yaml")
    assert (tuned.labels, tuned.model) == (LABELS, config.model)


def test_pre_training_goes_on_with_the_checkpoints_settings(config, changed, tmp_path):
    """Those that the YAML left out were the defaults', and `model` was blamed for sizes that did not fit."""
    save(tmp_path / "pre.pt", config, build_network(config).state_dict(), results={})
    spans = "augment: {spans: {time_probability: 0.5}}"
    text = f"name: more\ninit: {{checkpoint: {tmp_path / 'pre.pt'}}}\n{spans}\npretraining: {{negatives: 7}}\n"
    (tmp_path / "more.yaml").write_text(text)
    assert load_config(tmp_path / "more.yaml").pretraining == changed(config, pretraining={"negatives": 7}).pretraining
    own = yaml.safe_dump(config_to_dict(load_config(tmp_path / "more.yaml")) | {"pretraining": {"negatives": 7}})
    (tmp_path / "own.yaml").write_text(own)
    assert load_config(tmp_path / "own.yaml") == load_config(tmp_path / "more.yaml")
    wider = load_config(tmp_path / "more.yaml", ("pretraining.codes=32",))
    with pytest.raises(CheckpointError, match=r"\n  `pretraining.codes` is 32, in the checkpoint 16\n"):
        finetune.start_from_checkpoint(build_network(wider), wider)
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(config_to_dict(wider)))
    (tmp_path / "pre.pt").unlink()
    assert load_config(tmp_path / "whole.yaml") == wider
