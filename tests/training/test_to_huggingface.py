"""Folders of Hugging Face that we write; references/wav2vec2_models.py made those that are read for it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from carnelian_training.cli import main
from carnelian_training.config_tree import config_to_dict
from carnelian_training.foreign import huggingface, sources
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.replacement import WriteError
from carnelian_training.weight_files import CheckpointError

REFERENCES = Path(__file__).parent / "references"


def test_a_round_trip_through_the_command_keeps_everything(tmp_path, call):
    for source in ("wav2vec2_base", "wav2vec2_pretraining"):
        ours, folder = tmp_path / f"{source}.pt", tmp_path / source
        status, out, _ = call(main, "import", REFERENCES / source, ours)
        assert status == 0
        assert call(main, "to-huggingface", ours, folder)[0] == 0
        config, weights = sources.read(REFERENCES / source)
        again, same = sources.read(folder)
        assert config_to_dict(again) == config_to_dict(config)
        assert weights.keys() == same.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, same[name]), name
        options = json.loads((folder / "config.json").read_text())
        before = json.loads((REFERENCES / source / "config.json").read_text())
        assert {name: before[name] for name in options if name in before} == options
        if source == "wav2vec2_base":
            assert "wav2vec2, 14,567 parameters, 6 labels" in out
    vocabulary = json.loads((tmp_path / "wav2vec2_base" / "vocab.json").read_text())
    assert list(vocabulary) == ["<pad>", "<s>", "</s>", "<unk>", "|", "e", "t", "a", "'", "z"]


def test_what_transformers_will_do_otherwise_is_told(tmp_path, call):
    """fairseq guards the variance of quiet clips more, and not a word was said."""
    for source, is_told in (("wav2vec2_new.pt", True), ("wav2vec2_large", False), ("wav2vec2_old.pt", False)):
        ours = tmp_path / "ours.pt"
        assert call(main, "import", REFERENCES / source, ours)[0] == 0
        status, out, _ = call(main, "to-huggingface", ours, tmp_path / source)
        assert status == 0
        assert ("note: `features.variance_guard` is 1e-05, but transformers has 1e-07" in out) == is_told


def test_networks_that_transformers_has_not_are_refused(tmp_path, tiny_config):
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    pooled = HourglassConfig(before=0, pooled=2, after=0, factor=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hourglass=pooled))
    for wrong, message in ((config, "hourglass` must be none"), (tiny_config, "not a quartznet")):
        with pytest.raises(CheckpointError, match=message):
            huggingface.write(tmp_path / "x", wrong, weights)


def test_the_folder_of_another_model_is_no_target(tmp_path):
    """Its added tokens would have got rows of the new head."""
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    for _ in range(2):
        huggingface.write(tmp_path / "mine", config, weights)
    (tmp_path / "mine" / "added_tokens.json").write_text('{"é": 10}')
    with pytest.raises(CheckpointError, match=r"must be a new folder.* would read its added_tokens\.json"):
        huggingface.write(tmp_path / "mine", config, weights)


def test_a_folder_that_finds_no_room_is_as_it_was(room, tmp_path):
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    huggingface.write(tmp_path / "mine", config, weights)
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    with room(10_000), pytest.raises(WriteError, match=r"model\.safetensors could not be written, and is as it was"):
        huggingface.write(tmp_path / "mine", config, {name: tensor + 1 for name, tensor in weights.items()})
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_a_label_that_would_pass_for_the_space_is_refused(tmp_path):
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    for labels in ((" ", "|", *config.labels[2:]), ("|", *config.labels[1:])):
        with pytest.raises(CheckpointError, match=r"`labels` must not hold '\|'"):
            huggingface.write(tmp_path / "x", dataclasses.replace(config, labels=labels), weights)


@pytest.mark.parametrize(("source", "is_masked"), [("wav2vec2_base", False), ("wav2vec2_large", True)])
def test_padding_is_masked_in_transformers_where_the_model_was_trained_so(tmp_path, call, source, is_masked):
    assert call(main, "import", REFERENCES / source, tmp_path / "ours.pt")[0] == 0
    assert call(main, "to-huggingface", tmp_path / "ours.pt", tmp_path / "folder")[0] == 0
    extractor = json.loads((tmp_path / "folder" / "preprocessor_config.json").read_text())
    assert extractor["return_attention_mask"] is is_masked
