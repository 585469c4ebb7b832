import dataclasses
import math
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from carnelian_training.config import config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.models.jasper import JasperConfig, JasperStageConfig
from carnelian_training.models.pretraining import PretrainingConfig
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.run_config import load_config, load_run

CONFIGS = sorted((Path(__file__).parents[2] / "training" / "configs").glob("*.yaml"))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\nmodel: {name: quartznet, stages: [{filters: 8, kernel: 3}]}\n")
    return path


def test_the_home_folder_may_begin_a_path_wherever_there_is_one(config_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config_file.write_text(config_file.read_text() + "data: {train: [{path: ~/train.jsonl}], dev: '~/dev.jsonl'}\n")
    config = load_config(config_file, ("augment.noise.path=~/noise", "data.dev=~/other.jsonl"))
    assert config.data.train[0].path == tmp_path / "train.jsonl"
    assert config.data.dev == tmp_path / "other.jsonl"
    assert config.augment.noise.path == tmp_path / "noise"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_carries_its_files_name(path):
    assert load_run(path).name == path.stem


def test_the_recipe_on_the_page_can_be_added_to_the_configuration_that_it_names(tmp_path):
    page = (CONFIGS[0].parents[1] / "docs" / "training.md").read_text()
    name, recipe = re.search(r"add to a copy of `training/configs/(\w+\.yaml)`:\n\n((?: {4}.*\n)+)", page).groups()
    copy = tmp_path / name
    copy.write_text((CONFIGS[0].parent / name).read_text() + textwrap.dedent(recipe))
    assert load_config(copy).optimizer.name == "novograd"


@pytest.mark.parametrize(
    "path", ["nonsense", "data.nonsense", "model.nonsense", "model.stages.0.nonsense", "augment.nonsense"]
)
def test_unknown_keys_are_refused_at_every_depth(config_file, path):
    tree = yaml.safe_load(config_file.read_text())
    node = tree
    *parents, leaf = path.split(".")
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
    node[leaf] = 1
    with pytest.raises(ConfigError, match=path):
        config_from_dict(tree, "here")


@pytest.mark.parametrize(
    "path", ["data.train.0.path", "data.dev", "augment.noise.path", "augment.reverberation.path", "init.checkpoint"]
)
def test_no_path_is_empty(config_file, path):
    """To Path it is the working directory, whose every sound became noise."""
    config_file.write_text(config_file.read_text() + "data: {train: [{path: a}]}\n")
    with pytest.raises(ConfigError, match=rf"{path}: a path must not be empty.* \(found ''\)"):
        load_config(config_file, (f"{path}=''",))


def test_true_is_no_number(config_file):
    mistakes = ("augment.consistency=true", "augment.speed=[yes, 1]", "loop.steps=yes")
    with pytest.raises(ConfigError) as error:
        load_config(config_file, mistakes)
    assert str(error.value).splitlines()[1:] == [
        "  augment.consistency: must be a number (found True)",
        "  augment.speed.0: must be a number (found True)",
        "  loop.steps: must be a number (found True)",
    ]
    assert load_config(config_file, ("loop.compile=yes", "optimizer.lr=1e-3")).optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: wavenet, stages: []}", "'quartznet', 'jasper'"),
        ("{name: jasper, stages: [{filters: 8, kernel: 3, nonsense: 1}]}", r"model\.stages\.0\.nonsense"),
        ("{name: quartznet, dense: true, stages: [{filters: 8, kernel: 3}]}", r"model\.dense"),
    ],
)
def test_the_name_of_the_architecture_says_which_keys_there_are(config_file, model, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, (f"model={model}",))
    config = load_config(config_file, ("model={name: jasper, stages: [{filters: 8, kernel: 3}]}",))
    assert config.model == JasperConfig(stages=(JasperStageConfig(filters=8, kernel=3),))


def test_all_mistakes_are_reported_at_once(config_file):
    with pytest.raises(ConfigError, match=r"(?s)2 mistake.*data\.batch_s.*loop\.steps"):
        load_config(config_file, ("data.batch_s=many", "loop.steps=x"))


def test_overrides_reach_nested_values_before_validation(config_file):
    config = load_config(config_file, ("optimizer.lr=1e-3", "data.train=[{path: a.jsonl, repeat: 2}]"))
    assert config.optimizer.lr == 1e-3
    assert load_config(config_file, ("data.max_duration_s=.inf",)).data.max_duration_s == math.inf
    assert config.data.train[0].repeat == 2


def test_an_override_fills_a_section_that_is_empty(config_file):
    config_file.write_text(config_file.read_text() + "augment: {noise: null}\n")
    assert load_config(config_file, ("augment.noise.path=/noise",)).augment.noise.path == Path("/noise")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loop.steps", "must look like a.b=value"),
        ("name.x=1", "`name` is a value, not a section"),
        ("model.stages.1.kernel=3", "`model.stages` has positions 0 to 0, but no '1'"),
        ("model.stages.kernel=3", "`model.stages` has positions 0 to 0, but no 'kernel'"),
        ("name=a/b", "`name` must be fit to name files, without folders, but is 'a/b'"),
        ("name=''", "`name` must be fit to name files"),
        ('name="a\\0b"', r"`name` must have no control characters or lone surrogates, but has '\\x00'"),
        ('name="a\\nb"', r"`name` must have no control characters or lone surrogates, but has '\\n'"),
        ('name="a\\ud800"', r"`name` must have no control characters or lone surrogates, but has '\\ud800'"),
        (
            "labels=[a, no]",
            r"labels\.1: must be text, in quotes where YAML takes it for something else \(found False\)",
        ),
        ("optimizer.lrate=1", r"optimizer\.lrate: unknown key \(found 1\)"),
        ("data.train=a.jsonl", r"data\.train: must be a list \(found 'a.jsonl'\)"),
        ("loop=", r"loop: must be a section of `key: value` \(found None\)"),
        ("labels=[a, a]", r"are not: \['a'\]: put others in their place, .* import --set 'labels=\[\.\.\.\]'`$"),
        ("labels=[ab]", "distinct single"),
        ("labels=[a, a\u0308]", r"composed \(NFC\), but these are not: \['a\\u0308'\]"),
        ("model.num_mels=0", r"`num_mels` must be at least 1"),
        ("features.num_mels=80", "`model.num_mels` must be `features.num_mels`, 80, but is 64"),
        ("features.edges=mirror", r"features\.edges"),
        ("data.batch_s=0", "`batch_s` must be positive"),
        ("loop.log_every_steps=0", "`log_every_steps` must be at least 1"),
        ("loop.milestones=[-100, 5]", r"`milestones` must be steps, at least 1, but hold \[-100\]"),
        ("loop.keep_last=0", "`keep_last` must be at least 1"),
        ("loop={compile: true, recompute: true}", "`compile` must be false with `recompute`, .* choose one"),
        (
            "loop.seed=18446744073709551616",
            r"`seed` must be at least -2\^63 and below 2\^64, but is 18446744073709551616",
        ),
        ("data.train=[{path: a.jsonl}", "cannot be read as YAML"),
        ("name=2001-99-99", r"'name=2001-99-99': .* month must be in 1\.\.12"),
        ("name=!!timestamp x", "cannot be read as YAML"),
        ("name=!!bool maybe", r"(?s)cannot be read as YAML: a value is no bool: 'maybe'.*line 1, column 1"),
        ('loop.steps=!!int ""', r"(?s)cannot be read as YAML: a value is no int: .*line 1, column 1"),
        ('name="a\\U00110000"', r"(?s)cannot be read as YAML: chr\(\) arg not in range.*line 1, column 5"),
        ('name="\\UFFFFFFFF"', r"(?s)cannot be read as YAML: Python int too large.*line 1, column 4"),
        pytest.param("name=0x" + "f" * 5000, "YAML: a value is no int: Exceeds the limit", id="name=0xf..."),
        ("labels=[]", "`labels` must hold one character at least"),
        ("data.min_duration_s=20", "`min_duration_s` must be at most `max_duration_s`, 16.7, but is 20"),
        ("augment.frequency_masks=-1", "`frequency_masks` must be finite and at least 0, but is -1"),
        (
            "augment.frequency_mask_bands=65",
            r"tiny\.yaml: `augment.frequency_mask_bands` must be at most `features.num_mels`, 64, but is 65",
        ),
        ("augment={cutout_boxes: 1, cutout_bands: 65}", "`augment.cutout_bands` must be at most .*, 64, but is 65"),
        ("augment.dither=.nan", "`dither` must be finite and at least 0, but is nan"),
        ("augment.time_mask_share=2", "`time_mask_share` must be within 0 to 1"),
        ("data.num_threads=100000", "`num_threads` must be at most 1,024, but is 100,000"),
        ("data.prefetch_batches=100000", "`prefetch_batches` must be at most 1,024, but is 100,000"),
        ("augment.time_masks=1025", "`time_masks` must be at most 1,024, but is 1,025"),
        ("augment.frequency_masks=1025", "`frequency_masks` must be at most 1,024, but is 1,025"),
        ("augment.cutout_boxes=1025", "`cutout_boxes` must be at most 1,024, but is 1,025"),
        ("data.train=[{path: a, repeat: 1000000000}]", "`repeat` must be at most 10,000, but is 1,000,000,000"),
        ("model.stages.0.filters=3000000000", "`filters` must be at most 2,147,483,647"),
        ("features.preemphasis=1.5", "`preemphasis` must be at most 1, but is 1.5"),
        ("features.log_guard=1e300", r"`log_guard` must be at most 1, but is 1e\+300"),
        ("features.log_guard=.nan", "`log_guard` must be positive and finite, but is nan"),
        ("features.preemphasis=.inf", "`preemphasis` must be finite and at least 0, but is inf"),
        ("features.std_guard=-1", "`std_guard` must be finite and at least 0, but is -1"),
        ("features={name: waveform, variance_guard: .nan}", "`variance_guard` must be positive and finite, but is nan"),
        ("augment.spans.time_least=-7", "`time_least` must be finite and at least 0, but is -7"),
        ("optimizer.lr=-1", "`lr` must be positive and finite, but is -1"),
        ("optimizer.lr=.nan", "`lr` must be positive and finite, but is nan"),
        ("optimizer.lr=1e-6", "`min_lr` must be at most `lr`, 1e-06, but is 1e-05"),
        ("optimizer.warmup_steps=-1", "`warmup_steps` must be finite and at least 0"),
        ("optimizer={name: muon}", r"`betas` must suit muon, .* here it is 0.01, where 0.001 is usual"),
        ("optimizer={name: adamw, lr: 0.002}", r"must suit adamw, .* \(the defaults are NovoGrad's\)$"),
        ("=3", r"an override must look like a\.b=value, but is '=3'"),
        ("..=3", r"an override must look like a\.b=value, but is '\.\.=3'"),
        ("optimizer.=3", r"an override must look like a\.b=value, but is 'optimizer\.=3'"),
        ("optimizer.betas=[1.0, 0.5]", "`betas` must be at least 0 and below 1"),
        ("loop.checkpoint_every_s=0", "`checkpoint_every_s` must be positive"),
    ],
)
def test_wrong_overrides_say_what_is_wrong(config_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, (override,))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (PretrainingConfig, {"feature_dropout": -7}),
        (PretrainingConfig, {"similarity_temperature": math.nan}),
        (PretrainingConfig, {"diversity_weight": -1}),
        (PretrainingConfig, {"penalty_weight": math.nan}),
        (PretrainingConfig, {"crop_s": math.inf}),
        (PretrainingConfig, {"temperature": (math.inf, 1.0)}),
        (Wav2Vec2Config, {"norm_eps": -7}),
        (Wav2Vec2Config, {"conv_channels": (512, 0, 512, 512, 512, 512, 512)}),
    ],
)
def test_numbers_that_no_network_can_work_with_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must"):
        kind(**wrong)


def test_a_warm_up_that_outlasts_the_run_is_named_by_the_first_process(config_file, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    load_run(config_file, ("loop.steps=60",))
    assert not caplog.messages
    monkeypatch.setenv("RANK", "0")
    load_run(config_file, ("loop.steps=1000",))
    assert not caplog.messages
    load_run(config_file, ("loop.steps=60",))
    assert "`optimizer.warmup_steps` should be at most `loop.steps`, 60, but is 1000" in caplog.text


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")
    for name, content in (("a.jsonl", b'{"a": 1}\n{"a": 2}\n'), ("a.pt", b"PK\x80")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ConfigError, match=rf"{name}: cannot be read as YAML; give a training YAML, as those in .*/$"
        ):
            load_config(tmp_path / name)
    broken = tmp_path / "broken.yaml"
    broken.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.yaml: cannot be read as YAML"):
        load_config(broken)
    broken.write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match=r"(?s)broken\.yaml: .* no anchor .* may hold its own alias .* but `a` does"):
        load_config(broken)
    broken.write_text("a: " + "[" * 2000)
    with pytest.raises(ConfigError, match=r"broken\.yaml: cannot be read as YAML: its sections nest too deep"):
        load_config(broken)
    broken.write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(broken)


def test_a_language_models_file_is_no_recognisers():
    path = next(path for path in CONFIGS if path.stem == "transformer_xl_small")
    with pytest.raises(ConfigError, match=r"xl_small\.yaml must be of a recogniser, but is of a language model"):
        load_config(path)


@pytest.mark.parametrize("nest", ["[{}]", "{{<<: [{}]}}"])
def test_nested_aliases_that_stand_for_billions_of_nodes_are_refused(config_file, nest):
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{i}: &a{i} {nest.format(', '.join([f'*a{i - 1}'] * 9))}" for i in range(1, 10)]
    config_file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"(?s)aliases .* must stand for at most 100,000 nodes .*line"):
        load_config(config_file)


def test_anchors_and_merges_save_typing(config_file):
    stages = "[&stage {filters: 8, kernel: 3}, {<<: *stage, filters: 16}, *stage]"
    config_file.write_text(f"name: tiny\nmodel: {{name: quartznet, stages: {stages}}}\n")
    found = load_config(config_file).model.stages
    assert [(stage.filters, stage.kernel) for stage in found] == [(8, 3), (16, 3), (8, 3)]


@pytest.mark.parametrize("label", ["\x92", "\t"])
def test_labels_that_terminals_obey_are_refused(tiny_config, label):
    with pytest.raises(ValueError, match=r"must have no control characters or .*, but has '\\(x92|t)': "):
        dataclasses.replace(tiny_config, labels=(" ", "a", label))


def test_a_long_value_is_cut_in_a_message(config_file):
    with pytest.raises(ConfigError) as refusal:
        load_config(config_file, ("loop.steps=" + "x" * 10_000,))
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("text", ["loop: {steps: 3}\nname: x\nloop: {seed: 2}\n", "loop: {steps: 3, steps: 4}\n"])
def test_a_key_that_comes_twice_is_refused(config_file, text):
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)the key `(loop|steps)` must come once, but comes 2 times.*line"):
        load_config(config_file)
    with pytest.raises(ConfigError, match="`seed` must come once"):
        load_config(CONFIGS[0], ("loop={seed: 1, seed: 2}",))


def test_overrides_reach_into_lists(config_file):
    config_file.write_text(
        "name: tiny\nmodel: {name: quartznet, stages: [&one {filters: 8, kernel: 3}, *one]}\n"
        "data: {train: [{path: a.jsonl}, {path: b.jsonl}]}\n"
    )
    config = load_config(config_file, ("model.stages.1.kernel=5", "data.train.0.path=c.jsonl"))
    assert [stage.kernel for stage in config.model.stages] == [3, 5]
    assert [str(manifest.path) for manifest in config.data.train] == ["c.jsonl", "b.jsonl"]


def test_what_yaml_merges_may_be_overridden(config_file):
    stages = "[&wide {filters: 8, kernel: 3}, {<<: *wide, kernel: 5}]"
    config_file.write_text(f"name: tiny\nmodel: {{name: quartznet, stages: {stages}}}\n")
    assert [stage.kernel for stage in load_config(config_file).model.stages] == [3, 5]


def test_a_configuration_survives_the_way_through_plain_values(config_file):
    config = load_config(config_file)
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(config_to_dict(config))), "again") == config
