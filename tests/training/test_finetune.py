import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from carnelian_training import checkpoint
from carnelian_training.config import config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import read_manifest
from carnelian_training.distributed import Process
from carnelian_training.evaluation.evaluate import evaluate
from carnelian_training.loop import finetune
from carnelian_training.loop.optim import build_optimizer
from carnelian_training.loop.recognition import shares
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise, train
from carnelian_training.loop_config import FreezeConfig, InitConfig
from carnelian_training.run_config import load_config
from carnelian_training.weight_files import CheckpointError


@pytest.fixture
def source(tiny_config, tmp_path):
    """A checkpoint to start from, in float16 as published ones are."""
    torch.manual_seed(7)
    weights = checkpoint.build_model(tiny_config).state_dict()
    path = tmp_path / "source.pt"
    checkpoint.save(tmp_path / "whole.pt", tiny_config, weights, results={})
    checkpoint.publish(tmp_path / "whole.pt", path)
    return path


def with_init(config, source, **changes):
    return dataclasses.replace(config, init=InitConfig(checkpoint=source, **changes))


def started(config):
    torch.manual_seed(1)
    model = checkpoint.build_model(config)
    finetune.start_from_checkpoint(model, config)
    return model


def rows(model, config):
    return dict(
        zip([*config.labels, "blank"], model.head.weight.unflatten(0, (config.model.head_frames, -1))[0], strict=True)
    )


def test_the_same_labels_keep_every_weight(tiny_config, source):
    model = started(with_init(tiny_config, source))
    _, exact = checkpoint.load_model(source)
    for name, weights in exact.state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), name


def test_a_new_alphabet_keeps_the_body_and_the_rows_of_shared_labels(tiny_config, source, caplog):
    caplog.set_level("INFO")
    config = dataclasses.replace(with_init(tiny_config, source), labels=(*"éa b\u0301",))
    model = started(config)
    _, old = checkpoint.load_model(source)
    assert torch.equal(model.blocks[1].sub_blocks[0].norm.weight, old.blocks[1].sub_blocks[0].norm.weight)
    new_rows, old_rows = rows(model, config), rows(old, tiny_config)
    for label in ("a", " ", "b", "blank"):
        assert torch.equal(new_rows[label], old_rows[label]), label
    mean = torch.stack([row for label, row in old_rows.items() if label != "blank"]).mean(dim=0)
    torch.testing.assert_close(new_rows["é"], mean)
    assert "the blank and 3 labels" in caplog.text
    assert "start at the mean of the old ones: 'é\\u0301'" in caplog.text
    assert "does not have: 'cdefghijklmnopqrstuvwxyz''" in caplog.text.replace('"', "'")


def test_new_labels_do_not_drown_what_the_old_ones_know(tiny_config):
    demo = Path(__file__).parents[2] / "demo" / "quartznet_demo.pt"
    config, before = checkpoint.load_model(demo)
    wider = dataclasses.replace(with_init(config, demo), labels=(*config.labels, *"äöüß"))
    heard = [evaluate(model, of, tiny_config.data.dev) for model, of in ((before, config), (started(wider), wider))]
    assert heard[0].transcripts == heard[1].transcripts


def test_more_frames_of_the_head_repeat_the_old_ones(tiny_config, changed, source):
    config = with_init(tiny_config, source)
    config = changed(config, model={"head_frames": 2})
    head = started(config).head.weight.unflatten(0, (2, -1))
    assert torch.equal(head[0], head[1])


def test_another_body_is_refused_tensor_by_tensor(tiny_config, source):
    tree = config_to_dict(with_init(tiny_config, source))
    tree["model"]["stages"][1] |= {"filters": 24, "repeat": 3}
    with pytest.raises(
        CheckpointError,
        match=r"(?s)`model\.stages\.1\.repeat` is 3, in the checkpoint 2\n.*sub_blocks\.2\.norm\.bias: not there.*"
        r"projection\.weight: must be \[24, 16, 1, 1\], but is \[16, 16, 1, 1\].*\n  and \d+ more$",
    ):
        started(config_from_dict(tree, "here"))


def test_a_body_that_computes_something_else_is_named(tiny_config, source, caplog):
    tree = config_to_dict(with_init(tiny_config, source))
    tree["model"]["stages"][0] |= {"dropout": 0.4}
    started(config_from_dict(tree, "here"))
    assert "compute something else" not in caplog.text
    tree["model"]["stages"][1] |= {"dilation": 2}
    started(config_from_dict(tree, "here"))
    assert "compute something else:\n  `model.stages.1.dilation` is 2, in the checkpoint 1" in caplog.text


def test_other_features_than_those_of_the_checkpoint_are_warned_of(tiny_config, changed, source, caplog):
    for edges, warned in (("reflect", False), ("zero", True)):
        config = changed(with_init(tiny_config, source), features={"edges": edges})
        finetune.start_from_checkpoint(checkpoint.build_model(config), config)
        assert ("`features` differ from those that" in caplog.text) == warned


def test_a_checkpoint_of_another_family_is_refused_in_one_line(source, tmp_path):
    (tmp_path / "fine.yaml").write_text(f"name: fine\nmodel: {{name: wav2vec2}}\ninit: {{checkpoint: {source}}}\n")
    with pytest.raises(CheckpointError, match=r"^`init\.checkpoint` must be of a wav2vec2.* is of a quartznet: .*$"):
        finetune.start_from_checkpoint(torch.nn.Module(), load_config(tmp_path / "fine.yaml"))


def test_the_yaml_of_a_fine_tuning_needs_neither_model_nor_labels(tiny_config, source, tmp_path):
    (tmp_path / "fine.yaml").write_text(f"name: fine\ninit: {{checkpoint: {source}}}\n")
    config = load_config(tmp_path / "fine.yaml")
    assert (config.model, config.labels) == (tiny_config.model, tiny_config.labels)
    assert load_config(tmp_path / "fine.yaml", ("labels=[a, b]",)).labels == ("a", "b")


def test_a_part_of_a_section_is_laid_over_the_checkpoints(tiny_config, tmp_path):
    tree = config_to_dict(tiny_config)
    tree["features"] |= {"preemphasis": 0.5, "edges": "zero"}
    checkpoint.save(tmp_path / "a.pt", config_from_dict(tree, "here"), {}, results={})
    (tmp_path / "fine.yaml").write_text(f"name: fine\ninit: {{checkpoint: {tmp_path / 'a.pt'}}}\n")
    config = load_config(tmp_path / "fine.yaml", ("model.stages.1.dropout=0.3", "features.preemphasis=0.9"))
    first, second = tiny_config.model.stages
    assert config.model.stages == (first, dataclasses.replace(second, dropout=0.3))
    assert (config.features.preemphasis, config.features.edges) == (0.9, "zero")
    alone = load_config(tmp_path / "fine.yaml", ("model={name: quartznet, stages: [{filters: 8, kernel: 3}]}",))
    assert len(alone.model.stages) == 1
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    assert load_config(tmp_path / "whole.yaml") == config
    with pytest.raises(ConfigError, match=r"`model\.stages` of the checkpoint has positions 0 to 1, .* given: \['2'\]"):
        load_config(tmp_path / "fine.yaml", ("model.stages.2.dropout=0.3",))
    with pytest.raises(ConfigError, match=r"model\.stages\.1\.drop: unknown key"):
        load_config(tmp_path / "fine.yaml", ("model.stages.1.drop=0.3",))
    (tmp_path / "a.pt").unlink()
    assert load_config(tmp_path / "whole.yaml") == config
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_config(tmp_path / "fine.yaml")


def test_statistics_that_stay_need_a_checkpoint(tiny_config, changed, tmp_path):
    with pytest.raises(ConfigError, match=r"`loop\.batch_statistics: frozen` must come with `init\.checkpoint`"):
        train(changed(tiny_config, loop={"batch_statistics": "frozen"}), tmp_path)


def test_frozen_stages_stay_as_they_are_until_their_step(tiny_config, source, tmp_path):
    freeze = (FreezeConfig(stages="body", until_step=3), FreezeConfig(stages=(0,)))
    config = with_init(tiny_config, source, freeze=freeze)
    train(config, tmp_path / "run")
    first = checkpoint.load(source)[1]["weights"]
    states = [checkpoint.load(tmp_path / "run" / f"tiny-{step:08d}.pt")[1]["weights"] for step in (3, 6)]
    for name, weights in first.items():
        changed = [not torch.equal(weights.to(state[name].dtype), state[name]) for state in states]
        if name.endswith("num_batches_tracked"):
            continue
        stage = config.model.stage_of(name)  # 0 and 1, and 2 is the head
        assert changed == [stage == 2, stage > 0], name


def test_stages_are_frozen_in_the_steps_before_the_one_named(tiny_config, source):
    config = with_init(tiny_config, source, freeze=(FreezeConfig(stages="body", until_step=3),))
    assert [finetune.frozen_stages(config, step) for step in (2, 3)] == [{0, 1}, set()]


def test_lower_stages_learn_more_slowly(tiny_config, source):
    config = with_init(tiny_config, source, stage_lr_decay=0.5)
    model = checkpoint.build_model(config)
    scales = {
        id(p): group["lr_scale"]
        for group in build_optimizer(config, model, Process(torch.device("cpu"))).param_groups
        for p in group["params"]
    }
    found = {config.model.stage_of(name): scales[id(p)] for name, p in model.named_parameters()}
    assert found == {0: 0.25, 1: 0.5, 2: 1.0}
    assert len(scales) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"checkpoint": "a.pt", "freeze": [{"stages": [2]}]}, r"stages of 0 to 1, but names \[2\]"),
        (
            {"checkpoint": "a.pt", "freeze": [{"stages": "body", "until_step": -1}]},
            "until_step` must be finite and at least 0",
        ),
        ({"freeze": [{"stages": "body"}]}, "must come with a `checkpoint`"),
        ({"stage_lr_decay": 0.0}, "above 0 and at most 1"),
        ({"checkpoint": "a.pt", "freeze": "head"}, r"init\.freeze: must be a list of sections.* \(found 'head'\)$"),
        (
            {"checkpoint": "a.pt", "freeze": [{"stages": "head"}]},
            r"init\.freeze\.0\.stages: must be `body`, .* \(found 'head'\)$",
        ),
    ],
)
def test_impossible_settings_are_refused(tiny_config, init, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config_to_dict(tiny_config) | {"init": init}, "here")


def test_a_step_moves_lower_stages_less(tiny_config, changed, source):
    config = changed(with_init(tiny_config, source, stage_lr_decay=0.1), optimizer={"weight_decay": 0.0})
    state = new_state(config, Process(torch.device("cpu")))
    before = {name: tensor.clone() for name, tensor in state.model.named_parameters()}
    assert optimise(state, next(iter(shares(read_manifest(config.data.dev), config, state))), config).is_finite
    moved = {}
    for name, tensor in state.model.named_parameters():
        stage = config.model.stage_of(name)
        moved[stage] = max(moved.get(stage, 0.0), (tensor - before[name]).abs().max().item())
    # The first step of Adam is as long as the learning rate, in the warm-up half of 0.002.
    assert moved == {stage: pytest.approx(1e-3 * 0.1 ** (2 - stage), rel=0.1) for stage in range(3)}


def test_an_average_starts_from_the_checkpoint_too(tiny_config, changed, source, tmp_path):
    config = changed(with_init(tiny_config, source), optimizer={"ema": 0.9, "lr": 1e-9, "min_lr": 0.0})
    train(changed(config, loop={"steps": 1}), tmp_path)
    first, average = (checkpoint.load(path)[1]["weights"] for path in (source, tmp_path / "tiny.pt"))
    for name, _ in checkpoint.build_model(config).named_parameters():
        torch.testing.assert_close(average[name], first[name].float(), atol=1e-6, rtol=0, msg=name)
