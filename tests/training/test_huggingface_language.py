"""Recognisers of several languages against `transformers`, as MMS is; references/wav2vec2_models.py made the folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_training.cli import main
from carnelian_training.config_errors import ConfigError
from carnelian_training.foreign import sources
from carnelian_training.weight_files import CheckpointError
from safetensors.torch import load_file, save_file

REFERENCES = Path(__file__).parent / "references"
SAMPLES = (2000, 1303)
TOLERANCE = 1e-4
LABELS = {"eng": (" ", *"eta'z"), "deu": (" ", *"äbct"), "fra": (" ", *"çdeéêtu")}


@pytest.fixture
def folder(tmp_path):
    """English in the model's weights, German beside them as safetensors and French as .bin."""
    return shutil.copytree(REFERENCES / "wav2vec2_adapters", tmp_path / "mms")


def said_by_transformers(language: str, i: int) -> torch.Tensor:
    """Log-probabilities among characters and blank: [frames, labels + 1]."""
    said = np.load(REFERENCES / "wav2vec2_adapters" / "said.npz")
    logits = torch.from_numpy(said[f"{'logits' if language == 'eng' else language}_{i}"])
    return logits[:, [*range(4, logits.shape[1]), 0]].log_softmax(1)


def check_says_as_transformers(path: Path, language: str) -> None:
    config, model = sources.load_model(path)
    assert config.labels == LABELS[language]
    assert config.model.adapter_width == 4
    rng = np.random.default_rng(1)
    with torch.inference_mode():
        for i, samples in enumerate(SAMPLES):
            signal = torch.from_numpy(rng.standard_normal(samples).astype(np.float32))
            found, _ = model(signal[None, None], torch.tensor([samples]))
            torch.testing.assert_close(found[0], said_by_transformers(language, i), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("language", LABELS)
def test_log_probabilities_are_those_of_load_adapter(folder, tmp_path, call, language):
    ours, back = tmp_path / "ours.pt", tmp_path / "back"
    status, out, _ = call(main, "import", folder, ours, "--language", language)
    assert status == 0
    assert f"{len(LABELS[language])} labels" in out
    check_says_as_transformers(ours, language)
    assert call(main, "to-huggingface", ours, back)[0] == 0
    assert json.loads((back / "config.json").read_text())["adapter_attn_dim"] == 4
    check_says_as_transformers(back, language)


def test_without_a_choice_the_languages_are_told(folder, tmp_path, call):
    status, _, err = call(main, "import", folder, tmp_path / "x.pt")
    assert status == 1
    assert "one of its 3 languages: choose with `carnelian-train import --language`, of deu, eng, fra" in err
    with pytest.raises(CheckpointError, match="one of its 3 languages"):
        sources.load_model(folder)


@pytest.mark.parametrize("missing", ["weights", "vocabulary"])
def test_a_language_needs_weights_and_a_vocabulary(folder, missing, set_keys):
    if missing == "weights":
        (folder / "adapter.fra.bin").unlink()
    else:
        set_keys(folder / "vocab.json", fra=None)
    with pytest.raises(CheckpointError, match=r"must have the language 'fra', but has deu, eng: .* adapter\.LANGUAGE"):
        sources.read(folder, language="fra")


def test_the_only_language_needs_no_choice(folder, set_keys):
    expected = sources.read(folder, "same", language="deu")
    (folder / "adapter.fra.bin").unlink()
    set_keys(folder / "tokenizer_config.json", target_lang="deu")
    found = sources.read(folder, "same")  # the file of the language counts, not what is left of another in the model
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())
    # A vocabulary without languages, as of a model that was fine-tuned for one.
    (folder / "vocab.json").write_text(json.dumps(json.loads((folder / "vocab.json").read_text())["deu"]))
    set_keys(folder / "tokenizer_config.json", target_lang=None)
    assert sources.read(folder, "same")[0] == expected[0]


def test_the_weights_language_must_be_known(folder, set_keys):
    for file in folder.glob("adapter.*"):
        file.unlink()
    for said in (None, "spa"):
        set_keys(folder / "tokenizer_config.json", target_lang=said)
        with pytest.raises(CheckpointError, match=rf"\(`target_lang`\), one of eng, deu, fra .* but says {said!r}"):
            sources.read(folder)
    set_keys(folder / "vocab.json", deu=None, fra=None)
    set_keys(folder / "tokenizer_config.json", target_lang=None)
    assert sources.read(folder)[0].labels == LABELS["eng"]


def test_safetensors_go_before_bin(folder):
    expected = sources.read(folder, "same", language="fra")[1]
    french = torch.load(folder / "adapter.fra.bin", weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in french.items()}, folder / "adapter.fra.bin")
    save_file(french, folder / "adapter.fra.safetensors")
    found = sources.read(folder, "same", language="fra")[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_half_an_adapter_is_refused(folder):
    """The other half would be of another language."""
    file = folder / "adapter.deu.safetensors"
    tensors = load_file(file)
    name = "wav2vec2.encoder.layers.1.adapter_layer.linear_1.weight"
    save_file({("x" if other == name else other): tensor for other, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=rf"(?s)deu\.safetensors: 2 .*  {name}: missing\n  x: unexpected"):
        sources.read(folder, language="deu")


def test_a_vocabulary_goes_before_tokens_that_were_added_for_another_language(folder):
    (folder / "added_tokens.json").write_text(json.dumps({"<unk>": 9, "<pad>": 11}))
    assert sources.read(folder, language="deu")[0].labels == LABELS["deu"]


def test_a_model_that_was_saved_without_its_processor_needs_it(hf_folder):
    (hf_folder / "vocab.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"must hold vocab\.json, but has none: copy it and tokenizer_config\.json"
    ):
        sources.read(hf_folder)


def test_other_folders_have_no_language_to_choose(hf_folder):
    with pytest.raises(CheckpointError, match="must have the language 'deu', but has one without a name"):
        sources.read(hf_folder, language="deu")
    with pytest.raises(CheckpointError, match="must be read without --language"):
        sources.read(REFERENCES / "wav2vec2_pretraining", language="deu")
    # Files of adapters mean nothing to a model without any, a vocabulary by languages does.
    shutil.copy(REFERENCES / "wav2vec2_adapters" / "adapter.deu.safetensors", hf_folder)
    expected = sources.read(hf_folder, "same")[0]
    (hf_folder / "vocab.json").write_text(json.dumps({"eng": json.loads((hf_folder / "vocab.json").read_text())}))
    assert sources.read(hf_folder, "same", language="eng")[0] == expected


def test_adapters_of_a_network_that_has_none_are_refused(hf_folder, set_keys):
    """`transformers` builds none where norms come after."""
    set_keys(hf_folder / "config.json", adapter_attn_dim=16)
    with pytest.raises(ConfigError, match="`adapter_width` must come with `norm_first`"):
        sources.read(hf_folder)
