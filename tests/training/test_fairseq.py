"""Files of fairseq, and of NVIDIA's DeepLearningExamples, which are such; references/wav2vec2_models.py made them."""

import pickle
from pathlib import Path

import pytest
import torch
from carnelian_training.config_errors import ConfigError
from carnelian_training.foreign import fairseq, sources, unpickling
from carnelian_training.foreign.fairseq import _literal
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.weight_files import CheckpointError

REFERENCES = Path(__file__).parent / "references"
LETTERS = "| 9\nX 8\nT 7\nA 6\n' 5\nZ 4\n"


def content_of(name):
    """What a file holds, with plain dictionaries for fairseq's objects."""
    return unpickling.plain(unpickling.load_checkpoint(REFERENCES / name), "here")


def test_what_fine_tuning_says_comes_before_what_pretraining_said():
    config, _ = sources.read(REFERENCES / "wav2vec2_new.pt")
    assert (config.augment.spans.time_probability, config.augment.spans.channel_probability) == (0.5, 0.25)
    config, _ = sources.read(REFERENCES / "wav2vec2_old.pt")
    assert config.augment.spans.time_probability == 0.65
    assert config.pretraining.temperature == (2.0, 0.5)


def test_a_recogniser_that_was_tuned_without_masks_is_tuned_on_without(tmp_path):
    content = content_of("wav2vec2_new.pt")
    content["cfg"]["model"]["apply_mask"] = False
    torch.save(content, tmp_path / "new.pt")
    config, _ = sources.read(tmp_path / "new.pt")
    assert config.augment.spans.time_probability == 0


def test_a_dictionary_can_be_given(tmp_path):
    path, dictionary = tmp_path / "without.pt", tmp_path / "dict.ltr.txt"
    torch.save(content_of("wav2vec2_new.pt") | {"task_state": None}, path)
    with pytest.raises(
        CheckpointError, match=r"its head has 10 rows.*: carnelian-train import --labels dict\.ltr\.txt"
    ):
        sources.read(path)
    for mark in ("", "\ufeff"):
        dictionary.write_text(mark + LETTERS, encoding="utf-8")
        assert sources.read(path, labels=dictionary)[0].labels[:2] == (" ", "x")
    # A symbol that ends a line of text, but not one of fairseq's dictionaries.
    dictionary.write_text(LETTERS.replace("X", "\u2028"), encoding="utf-8")
    assert sources.read(path, labels=dictionary)[0].labels[:2] == (" ", "\u2028")
    dictionary.write_text("| 9\n")
    with pytest.raises(CheckpointError, match="as many symbols as the head, 10, not 5"):
        sources.read(path, labels=dictionary)
    dictionary.write_bytes(b"\xe9 9\n")
    with pytest.raises(CheckpointError, match=r"dict\.ltr\.txt cannot be read as a dictionary: 'utf-8' codec"):
        sources.read(path, labels=dictionary)


def test_a_dictionary_of_nvidias_file_is_read(tmp_path, caplog):
    """It was not looked at: a head of 32 rows was said to be LibriSpeech's, whatever its letters were."""
    content = content_of("wav2vec2_new.pt")
    weights = content["model"]
    for part in ("weight", "bias"):
        weights[f"w2v_encoder.proj.{part}"] = torch.randn(32, *weights[f"w2v_encoder.proj.{part}"].shape[1:])
    letters = "|абвгдежзийклмнопрстуфхцчшщъ"
    content = {"args": content["cfg"], "model": weights}
    torch.save(content | {"output_labels": "".join(f"{c} 9\n" for c in letters)}, tmp_path / "ru.pt")
    assert "".join(sources.read(tmp_path / "ru.pt")[0].labels) == " " + letters[1:]
    assert not caplog.messages


def test_an_average_that_nvidias_inference_does_not_read_is_named(tmp_path, caplog):
    content = content_of("wav2vec2_new.pt") | {"output_labels": LETTERS}
    torch.save(content | {"ema_model": None}, tmp_path / "without.pt")
    _, weights = sources.read(tmp_path / "without.pt")
    assert not caplog.messages
    average = {name: tensor + 1 for name, tensor in content["model"].items()}
    torch.save(content | {"ema_model": average}, tmp_path / "with.pt")
    _, beside = sources.read(tmp_path / "with.pt")
    assert all(torch.equal(weights[name], beside[name]) for name in weights)
    assert "`ema_model`, which is left aside" in caplog.text


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("task", "sample_rate", 8000),
        ("inner", "sample_rate", 8000),
        ("model", "blank_weight", 5.0),
        ("inner", "crop_seq_to_multiple", 4),
        ("inner", "rotary_embeddings", True),
        ("inner", "activation_fn", "relu"),
        ("inner", "layer_type", "conformer"),
        ("inner", "pos_enc_type", "rope"),
        ("inner", "pos_conv_depth", 5),
        ("inner", "conv_pos_batch_norm", True),
        ("inner", "use_spectrogram_features", True),
    ],
)
def test_what_fairseq_would_do_otherwise_is_refused(tmp_path, section, option, value):
    """Options that bear on what a trained network says; they were dropped."""
    content = content_of("wav2vec2_new.pt")
    cfg = content["cfg"]
    (cfg["model"]["w2v_args"]["model"] if section == "inner" else cfg[section])[option] = value
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"`{option}` must be .*, but is {value!r}"):
        sources.read(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize_input", True),
        ("quantizer_depth", 2),
        ("target_glu", True),
        ("negatives_from_everywhere", True),
        ("cross_sample_negatives", 10),
        ("codebook_negatives", 10),
    ],
)
def test_a_pre_training_of_another_kind_is_refused(option, value):
    content = content_of("wav2vec2_old.pt")
    content["args"][option] = value
    with pytest.raises(CheckpointError, match=rf"`{option}` must be .*, but is {value!r}"):
        fairseq.config_tree(content, None, "here")


def test_how_the_network_was_trained_comes_along():
    content = content_of("wav2vec2_old.pt")
    theirs = {"dropout_input": 0.11, "encoder_layerdrop": 0.12, "feature_grad_mult": 0.13, "activation_dropout": 0.14}
    content["args"] |= theirs
    model = fairseq.config_tree(content, None, "here")[0]["model"]
    ours = ("input_dropout", "layer_drop", "extractor_gradient", "activation_dropout")
    assert [model[name] for name in ours] == [0.11, 0.12, 0.13, 0.14]


def test_how_a_network_was_fine_tuned_wins_over_its_pre_training():
    content = content_of("wav2vec2_new.pt")
    content["cfg"]["model"] |= {"dropout": 0.21, "dropout_input": 0.22, "layerdrop": 0.23, "feature_grad_mult": 0.0}
    content["cfg"]["model"]["w2v_args"]["model"] |= {"encoder_layerdrop": 0.5, "dropout": 0.5, "dropout_input": 0.5}
    model = fairseq.config_tree(content, None, "here")[0]["model"]
    assert [model[name] for name in ("dropout", "input_dropout", "layer_drop")] == [0.21, 0.22, 0.23]
    assert model["extractor_gradient"] == 0.0


def test_a_file_without_the_options_of_its_network_says_where_they_are():
    content = content_of("wav2vec2_new.pt")
    del content["cfg"]["model"]["w2v_args"]
    content["cfg"]["model"]["w2v_path"] = "/data/base.pt"
    with pytest.raises(CheckpointError, match=r"`encoder_layers`: its `w2v_args` .* `w2v_path`, /data/base\.pt$"):
        fairseq.config_tree(content, None, "here")
    content["model"]["decoder.embed_out"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"`encoder_layers`: it has a decoder, so it is no CTC model$"):
        fairseq.config_tree(content, None, "here")


def test_a_hubert_of_fairseq_is_read(tmp_path):
    """Fine-tuned, it is the same network; only its file has the targets of its pre-training besides."""
    content = content_of("wav2vec2_new.pt")
    content["cfg"]["model"]["final_dropout"] = 0.25
    expected = sources.read(REFERENCES / "wav2vec2_new.pt")[1]
    content["model"]["w2v_encoder.w2v_model.label_embs_concat"] = torch.randn(504, 8)
    torch.save(content, tmp_path / "hubert.pt")
    config, found = sources.read(tmp_path / "hubert.pt")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert config.model.head_dropout == 0.25


def test_the_loss_and_the_crop_of_a_pre_training_come_along():
    """Large's lacks the penalty; it was 10, as Base's."""
    old = content_of("wav2vec2_old.pt")
    options = old["args"]
    new = {
        "criterion": {"_name": "wav2vec", "infonce": True, "loss_weights": [0.2, 0.0]},
        "task": {"_name": "audio_pretraining", "max_sample_size": 320_000},
        "model": options,
    }
    old["args"] = options | {"loss_weights": "[0.2, 0]", "max_sample_size": 320_000}
    for content in (old, {"args": None, "cfg": new, "model": old["model"]}):
        pretraining = fairseq.config_tree(content, None, "here")[0]["pretraining"]
        found = [pretraining[name] for name in ("diversity_weight", "penalty_weight", "crop_s")]
        assert found == [0.2, 0, 20]
    old["args"]["loss_weights"] = "[0.2]"
    with pytest.raises(CheckpointError, match=r"`loss_weights` must be \[diversity, penalty\], but is \[0\.2\]"):
        fairseq.config_tree(old, None, "here")


def test_a_final_dim_of_0_is_the_transformers(tmp_path):
    content = content_of("wav2vec2_old.pt")
    content["args"] |= {"final_dim": 0, "latent_dim": 0}
    pretraining = fairseq.config_tree(content, None, "here")[0]["pretraining"]
    assert (pretraining["width"], pretraining["code_width"]) == (24, 24)


def test_an_option_may_stand_in_another_section(tmp_path):
    """`normalize: ${task.normalize}`, not resolved, was taken for true."""
    content = content_of("wav2vec2_new.pt")
    cfg = content["cfg"]
    cfg["model"]["normalize"] = "${task.normalize}"
    for normalise in (True, False):
        cfg["task"]["normalize"] = normalise
        torch.save(content, tmp_path / "x.pt")
        assert sources.read(tmp_path / "x.pt")[0].features.normalise is normalise
    cfg["task"]["normalize"] = "${common.normalize.all}"
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"features\.normalise"):
        sources.read(tmp_path / "x.pt")


@pytest.mark.parametrize(("theirs", "ours"), [("naive", "mean"), ("linear", "linear")])
def test_the_lists_of_layers_of_nvidias_hourglass_are_read(tmp_path, theirs, ours):
    """wav2vec2/wav2vec2/model.py of DeepLearningExamples; Base has one by default, and none could be imported."""
    content = content_of("wav2vec2_new.pt")
    args = content["cfg"]
    args["model"]["w2v_args"]["model"] |= {"hourglass_transformer": "[0,(1,2),1]", "hourglass_resample": theirs}
    weights = {}
    for name, tensor in content["model"].items():
        name = name.replace("encoder.layers.0.", "encoder.hourglass_layers.0.")
        weights[name.replace("encoder.layers.1.", "encoder.post_layers.0.")] = tensor
    if theirs == "linear":
        for name, sizes in (("downsample", (24, 48)), ("upsample", (48, 24))):
            layer = f"w2v_encoder.w2v_model.encoder.{name}_layer.linear"
            weights |= {f"{layer}.weight": torch.randn(sizes), f"{layer}.bias": torch.randn(sizes[0])}
    content = {"args": args, "model": weights, "output_labels": LETTERS}
    torch.save(content, tmp_path / "hourglass.pt")
    config, found = sources.read(tmp_path / "hourglass.pt")
    assert config.model.hourglass == HourglassConfig(before=0, pooled=1, after=1, factor=2, resampling=ours)
    plain = sources.read(REFERENCES / "wav2vec2_new.pt")[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    added = {"resampling.down.weight", "resampling.down.bias", "resampling.up.weight", "resampling.up.bias"}
    assert found.keys() - plain.keys() == (added if theirs == "linear" else set())
    args["model"]["w2v_args"]["model"]["hourglass_resample"] = "attention"
    torch.save(content, tmp_path / "hourglass.pt")
    with pytest.raises(CheckpointError, match="`hourglass_resample` must be one of naive, linear, but is 'attention'"):
        sources.read(tmp_path / "hourglass.pt")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("new_form", [True, False])
def test_no_code_of_a_file_runs(tmp_path, new_form):
    content = content_of("wav2vec2_old.pt")
    content |= {"args": None, "cfg": content["args"], "extra_state": Harmful(tmp_path / "touched")}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=new_form)
    config, _ = sources.read(tmp_path / "x.pt")
    assert config.pretraining is not None
    assert not (tmp_path / "touched").exists()
    pickle.loads(pickle.dumps(content["extra_state"]))  # it would have
    assert (tmp_path / "touched").exists()


def test_expressions_of_layers_are_read_and_nothing_else():
    found = _literal("[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512,2,2)] + [(512,2,2)]", "here")
    assert found == [(512, 10, 5), *[(512, 3, 2)] * 4, (512, 2, 2), (512, 2, 2)]
    assert _literal("[2,(8,4),2]", "here") == [2, (8, 4), 2]
    long = ("[1] * 100 * 100 * 100 * 100 * 10", "1" + "+1" * 100_000, "[" * 100_000, "(" * 400)  # memory, recursion
    for harmful in ("__import__('os').getcwd()", "[1] * 10 ** 9", "[1] * 1000000", "2 +", "'a'", *long):
        with pytest.raises(CheckpointError, match=r"here must be a short expression of numbers, but is .{,250}$"):
            _literal(harmful, "here")


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        (
            "conv_feature_layers",
            ["5", "[(1,2)]", "[]", [[1, 2, 3, 4]], 0, {"a": 1}],
            r"must list \(channels, kernel, stride\)",
        ),
        (
            "hourglass_transformer",
            ["5", "[1,2,3]", "[(1,2)]", 7, [[1]]],
            r"must be \[before, \(pooled, factor\), after\]",
        ),
        ("latent_temp", ["(1,2)", "5", 5, ["a"]], r"must be \(start, end, decay\)"),
    ],
)
def test_what_is_no_list_of_layers_is_named(option, values, message):
    """Each ended in a traceback, or in words such as "not enough values to unpack"."""
    content = content_of("wav2vec2_old.pt")
    for value in values:
        content["args"][option] = value
        with pytest.raises(CheckpointError, match=f"here: `{option}` {message}, but is "):
            fairseq.config_tree(content, None, "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_layers": 10**9}, "at most, but describes 1000000003"),
        ({"encoder_embed_dim": 10**9}, "Storage size calculation overflowed"),
        ({"conv_feature_layers": [[10**40, 10, 5]]}, "failed to unpack"),
    ],
)
def test_a_network_that_no_file_holds_is_not_built(tmp_path, options, message):
    content = content_of("wav2vec2_old.pt")
    content["args"] |= options
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"x\.pt must describe a network of .*{message}"):
        sources.read(tmp_path / "x.pt")


@pytest.mark.parametrize("state", ["abc", {"target_dictionary": 1}, {"target_dictionary": {"symbols": [["a"]] * 10}}])
def test_a_dictionary_of_another_form_is_named(tmp_path, state):
    content = content_of("wav2vec2_new.pt")
    torch.save(content | {"task_state": state}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt.* must (come with its dictionary|list text)"):
        sources.read(tmp_path / "x.pt")


def test_options_that_stand_for_billions_are_refused():
    """A file of a few kilobytes took all memory."""
    options, nested = {"a": 1}, {"a": 1}
    for _ in range(40):
        options = {"a": options, "b": options}
    for _ in range(100_000):
        nested = {"a": nested}
    for found, message in ((options, "at most 1,000,000 options"), (nested, "nest too deep")):
        with pytest.raises(CheckpointError, match=f"here must hold .*{message}"):
            fairseq.config_tree({"model": {}, "args": found}, None, "here")


def test_a_tensor_is_no_larger_than_its_file(tmp_path):
    content = content_of("wav2vec2_new.pt")
    content["model"]["w2v_encoder.proj.bias"] = torch.zeros(1).expand(10**13)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError, match=r"x\.pt: .* must be a dense tensor, but these are not: w2v_encoder\.proj"
    ):
        sources.read(tmp_path / "x.pt")


def test_samples_are_as_they_are_where_a_file_says_nothing_of_normalising(tmp_path):
    """fairseq's own default: Base was trained so."""
    content = content_of("wav2vec2_new.pt")
    cfg = content["cfg"]
    inner = cfg["model"]["w2v_args"]
    for section in (cfg["task"], cfg["model"], inner.get("task") or {}, inner["model"]):
        section.pop("normalize", None)
    torch.save(content, tmp_path / "silent.pt")
    assert not sources.read(tmp_path / "silent.pt")[0].features.normalise
