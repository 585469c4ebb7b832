"""wav2vec 2.0 of Hugging Face against `transformers`; references/wav2vec2_models.py made the files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.foreign import sources
from carnelian_training.models.pretraining import PretrainingConfig, Wav2Vec2Pretraining, hidden_frames, pick
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.weight_files import CheckpointError
from safetensors.torch import load_file, save_file

REFERENCES = Path(__file__).parent / "references"
SAMPLES = (2000, 1303)
TOLERANCE = 1e-4
KEPT = [4, 5, 6, 7, 8, 9, 0]  # rows of the head: |, letters, apostrophe, and the blank, which comes last here
LABELS = (" ", "e", "t", "a", "'", "z")


def signals() -> list[torch.Tensor]:
    """As references/wav2vec2_models.py, which runs where `transformers` is, makes them."""
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.standard_normal(samples).astype(np.float32)) for samples in SAMPLES]


def expected(logits: np.ndarray) -> torch.Tensor:
    """Log-probabilities among characters and blank: [frames, 7]."""
    return torch.from_numpy(logits)[:, KEPT].log_softmax(1)


@pytest.mark.parametrize(
    ("source", "said", "normalise"),
    [
        ("wav2vec2_base", "wav2vec2_base", False),
        ("wav2vec2_large", "wav2vec2_large", True),
        ("wav2vec2_new.pt", "wav2vec2_large", True),
    ],
)
def test_log_probabilities_are_those_of_transformers(source, said, normalise):
    config, model = sources.load_model(REFERENCES / source)
    said = np.load(REFERENCES / said / "said.npz")
    assert config.labels == LABELS
    assert config.features.normalise == normalise
    with torch.inference_mode():
        for i, signal in enumerate(signals()):
            lengths = torch.tensor([len(signal)])
            alone, ends = model(signal[None, None], lengths)
            torch.testing.assert_close(alone[0], expected(said[f"logits_{i}"]), atol=TOLERANCE, rtol=0)
            hidden = torch.arange(int(ends[0]))[None] % 3 == 1
            masked, _ = model(signal[None, None], lengths, hidden)
            torch.testing.assert_close(masked[0], expected(said[f"masked_{i}"]), atol=TOLERANCE, rtol=0)
        assert np.ptp(said["logits_0"]) > 3  # the comparison is about something


@pytest.mark.parametrize("source", ["wav2vec2_pretraining", "wav2vec2_old.pt"])
def test_pretraining_compares_what_transformers_compares(source):
    config, weights = sources.read(REFERENCES / source)
    said = {
        name: torch.from_numpy(found) for name, found in np.load(REFERENCES / "wav2vec2_pretraining/said.npz").items()
    }
    model = checkpoint.build_network(config).eval()
    assert isinstance(model, Wav2Vec2Pretraining)
    model.load_state_dict(weights)
    signal, lengths = signals()[0][None, None], torch.tensor([SAMPLES[0]])
    with torch.inference_mode():
        frames, ends = model.extract(signal, lengths)
        hidden = torch.arange(int(ends[0]))[None] % 3 != 0
        index, real = hidden_frames(hidden)
        normalised = model.extractor_norm(frames)
        codes = model._quantise(normalised, index, 1.0, None)
        targets = model.pretraining["target"](codes.vectors)
        guesses = model.pretraining["guess"](pick(model.encode(normalised, ends, hidden), index))
        torch.testing.assert_close(guesses[0], said["guesses"][index[0]], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(targets[0], said["targets"][index[0]], atol=TOLERANCE, rtol=0)
        others = (torch.arange(index.shape[1])[:, None] + 1 + torch.arange(5)) % index.shape[1]
        loss, _ = model._compare(guesses, targets, codes.ids, others[None], real)
    assert float(loss) == pytest.approx(float(said["loss"]), rel=1e-4)


def test_a_hubert_is_read_by_its_own_names(hf_folder, set_keys):
    """HubertForCTC of transformers 5.23 is the same network: log-probabilities within 4e-6, of either norm layout."""
    config, weights = sources.read(hf_folder, "same")
    tensors = load_file(hf_folder / "model.safetensors")
    theirs = {name.replace("wav2vec2.", "hubert.", 1): tensor for name, tensor in tensors.items()}
    save_file(theirs, hf_folder / "model.safetensors")
    options = {"model_type": "hubert", "conv_pos_batch_norm": False, "feat_proj_layer_norm": True}
    set_keys(hf_folder / "config.json", **options)
    found, same = sources.read(hf_folder, "same")
    assert found == config
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    save_file(
        {name: tensor for name, tensor in theirs.items() if "q_proj" not in name}, hf_folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"hubert\.encoder\.layers\.0\.attention\.q_proj\.weight: missing"):
        sources.read(hf_folder)


def test_parameters_of_base_in_pretraining():
    with torch.device("meta"):
        model = Wav2Vec2Pretraining(Wav2Vec2Config(), PretrainingConfig())
    assert sum(p.numel() for p in model.parameters()) == 95_044_608  # facebook/wav2vec2-base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "`hidden_act` must be 'gelu', but is 'relu'"),
        ({"model_type": "wavlm"}, "`model_type` must be 'wav2vec2', but is 'wavlm'"),
        ({"feat_extract_activation": "relu"}, "`feat_extract_activation` must be 'gelu', but is 'relu'"),
        ({"add_adapter": True}, "`add_adapter` must be False, but is True"),
        ({"model_type": "hubert", "conv_pos_batch_norm": True}, "`conv_pos_batch_norm` must be False, but is True"),
        ({"num_hidden_layers": 3}, r"wav2vec2\.encoder\.layers\.2\.attention\.q_proj\.weight: missing"),
        ({"hidden_size": 12}, r"masked_spec_embed: must be \[12\], but is \[24\]"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(hf_folder, set_keys, change, message):
    set_keys(hf_folder / "config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        sources.read(hf_folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("processor_config.json", {"feature_extractor": [1]}, r"a mapping as `feature_extractor`, but has \[1\]"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, r"a mapping as `added_tokens_decoder`, but has \[1\]"),
        ("tokenizer_config.json", {"additional_special_tokens": 7}, "a list as `additional_special_tokens`, but has 7"),
        ("special_tokens_map.json", {"additional_special_tokens": "<a>"}, "a list as .*, but has '<a>'"),
        ("tokenizer_config.json", {"extra_special_tokens": 3}, "a list or a mapping as `extra_special_tokens`"),
        ("tokenizer_config.json", {"target_lang": ["eng"]}, "text as `target_lang`"),
        ("config.json", {"pad_token_id": [0]}, r"a whole number as `pad_token_id`, but has \[0\]"),
        ("config.json", {"pad_token_id": "0"}, "a whole number as `pad_token_id`, but has '0'"),
        ("config.json", {"do_stable_layer_norm": "false"}, "true or false as `do_stable_layer_norm`, but has 'false'"),
        ("config.json", {"conv_bias": "no"}, "true or false as `conv_bias`"),
        ("config.json", {"apply_spec_augment": "false"}, "true or false as `apply_spec_augment`"),
        ("tokenizer_config.json", {"do_lower_case": "false"}, "true or false as `do_lower_case`"),
    ],
)
def test_options_of_another_kind_are_named(hf_folder, set_keys, file, change, message):
    set_keys(hf_folder / file, **change)
    with pytest.raises(CheckpointError, match=rf"x/{file} must have {message}"):
        sources.read(hf_folder)


def test_files_about_samples_that_say_null_are_as_good_as_none(hf_folder):
    (hf_folder / "processor_config.json").write_text('{"feature_extractor": null}')
    assert not sources.read(hf_folder)[0].features.normalise


def test_json_that_is_nested_too_deeply_is_named(hf_folder):
    (hf_folder / "tokenizer_config.json").write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json must be JSON .*: maximum recursion depth"):
        sources.read(hf_folder)


def test_gelu_by_its_other_name_is_the_same(hf_folder, set_keys):
    config, _ = sources.read(hf_folder, "same")
    set_keys(hf_folder / "config.json", hidden_act="gelu_python", feat_extract_activation="gelu_python")
    assert sources.read(hf_folder, "same")[0] == config


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "an adapter alone: merge it first"),
        ("tf_model.h5", "those of TensorFlow alone: save them as safetensors"),
    ],
)
def test_weights_of_another_kind_are_told_how_to_become_a_model(hf_folder, file, message):
    (hf_folder / file).write_text("{}")
    sources.read(hf_folder)
    (hf_folder / "model.safetensors").unlink()
    (hf_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=message):
        sources.read(hf_folder)


def test_a_recogniser_that_was_tuned_without_masks_is_tuned_on_without(hf_folder, set_keys):
    assert sources.read(hf_folder)[0].augment.spans.time_probability > 0
    set_keys(hf_folder / "config.json", apply_spec_augment=False)
    spans = sources.read(hf_folder)[0].augment.spans
    assert (spans.time_probability, spans.channel_probability) == (0, 0)


def test_how_the_network_was_trained_comes_along(hf_folder, set_keys):
    theirs = {"layerdrop": 0.12, "feat_proj_dropout": 0.13, "hidden_dropout": 0.14, "attention_dropout": 0.15}
    set_keys(hf_folder / "config.json", **theirs)
    model = sources.read(hf_folder)[0].model
    found = (model.layer_drop, model.input_dropout, model.dropout, model.attention_dropout)
    assert found == (0.12, 0.13, 0.14, 0.15)


def test_what_only_pretraining_needs_may_be_left_in_a_recogniser(hf_folder):
    path = hf_folder / "model.safetensors"
    tensors = load_file(path)
    extra = {"quantizer.codevectors": torch.zeros(1, 4, 2), "project_hid.weight": torch.zeros(2, 2)}
    save_file(tensors | extra, path)
    sources.read(hf_folder)


def test_incomplete_folders_are_refused(hf_folder):
    (hf_folder / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
    with pytest.raises(CheckpointError, match="must say 16000 Hz"):
        sources.read(hf_folder)
    (hf_folder / "preprocessor_config.json").unlink()
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold model\.safetensors or pytorch_model\.bin"):
        sources.read(hf_folder)
    torch.save({"lm_head.weight": None}, hf_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.bin: .* a dense tensor, but these are not: lm_head\.weight"):
        sources.read(hf_folder)
    (hf_folder / "model.safetensors").write_text("no tensors")
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        sources.read(hf_folder)
    (hf_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"must be a Hugging Face folder, but has no config\.json"):
        sources.read(hf_folder)


def test_what_todays_transformers_writes_about_samples_is_read(hf_folder, caplog):
    extractor = json.loads((hf_folder / "preprocessor_config.json").read_text())
    assert extractor["do_normalize"] is False
    (hf_folder / "preprocessor_config.json").unlink()
    (hf_folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor}))  # 5.x, in its place
    assert not sources.read(hf_folder)[0].features.normalise
    assert not caplog.messages
    (hf_folder / "processor_config.json").unlink()
    assert sources.read(hf_folder)[0].features.normalise
    assert "preprocessor_config.json must say whether samples are normalised" in caplog.text


@pytest.mark.parametrize("name", ["feature_extractor", "audio_processor"])
def test_the_file_that_todays_transformers_writes_goes_before_the_older_one(hf_folder, caplog, name):
    """It leaves the older one beside its own, and reads its own."""
    (hf_folder / "processor_config.json").write_text(json.dumps({name: {"do_normalize": False}}))
    assert not sources.read(hf_folder)[0].features.normalise
    assert not caplog.messages
    (hf_folder / "processor_config.json").write_text(json.dumps({name: {"do_normalize": True}}))
    assert sources.read(hf_folder)[0].features.normalise
    assert "processor_config.json of transformers 5 holds for `do_normalize`, True; " in caplog.text
    assert "preprocessor_config.json, which transformers 4 reads, says False" in caplog.text
    (hf_folder / "processor_config.json").write_text("{}")  # an older one, of the rest of the processor
    assert not sources.read(hf_folder)[0].features.normalise


def test_whether_samples_are_normalised_is_no_word(hf_folder):
    (hf_folder / "preprocessor_config.json").write_text('{"do_normalize": "false"}')
    with pytest.raises(CheckpointError, match="must say true or false for `do_normalize`, but says 'false'"):
        sources.read(hf_folder)


def test_a_language_model_that_is_left_aside_is_told(hf_folder, caplog):
    sources.read(hf_folder)
    assert caplog.text == ""
    (hf_folder / "language_model").mkdir()
    sources.read(hf_folder)
    assert "x/language_model, with which transformers decodes, is left aside" in caplog.text


@pytest.mark.parametrize("read", [sources.read, sources.load_model])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_of_a_folder_is_not_read_alone(hf_folder, file, read):
    with pytest.raises(CheckpointError, match=r"must be read with the rest of its Hugging Face folder: give \S+/x$"):
        read(hf_folder / file)


def test_the_folder_that_one_is_in_is_read_under_its_name(monkeypatch):
    monkeypatch.chdir(REFERENCES / "wav2vec2_base")
    assert sources.load_model(Path())[0].name == "wav2vec2_base"


def test_a_pretrained_checkpoint_is_no_recogniser(tmp_path):
    with pytest.raises(CheckpointError, match=r"was pre-trained and knows no letters yet: fine-tune it"):
        sources.load_model(REFERENCES / "wav2vec2_pretraining")


def test_the_loss_of_transformers_has_no_penalty():
    config, _ = sources.read(REFERENCES / "wav2vec2_pretraining")
    assert (config.pretraining.diversity_weight, config.pretraining.penalty_weight) == (0.1, 0)
