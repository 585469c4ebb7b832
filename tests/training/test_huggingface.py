"""wav2vec 2.0 of Hugging Face against `transformers`; references/wav2vec2_models.py made the files."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.checkpoint import CheckpointError
from carnelian_training.cli import main
from carnelian_training.config_tree import config_to_dict
from carnelian_training.foreign import huggingface, sources
from carnelian_training.foreign.alphabet import fold
from carnelian_training.models.hourglass import HourglassConfig
from carnelian_training.models.pretraining import PretrainingConfig, Wav2Vec2Pretraining, hidden_frames, pick
from carnelian_training.models.wav2vec2 import Wav2Vec2Config
from carnelian_training.replacement import WriteError
from safetensors.torch import load_file, save_file

REFERENCES = Path(__file__).parent / "references"
SAMPLES = (2000, 1303)
TOLERANCE = 1e-4
KEPT = [4, 5, 6, 7, 8, 9, 0]  # rows of the head: |, letters, apostrophe, and the blank, which comes last here
LABELS = (" ", "e", "t", "a", "'", "z")


def signals() -> list[torch.Tensor]:
    """As references/wav2vec2_models.py, which runs where `transformers` is, makes them."""
    draw = np.random.default_rng(1)
    return [torch.from_numpy(draw.standard_normal(samples).astype(np.float32)) for samples in SAMPLES]


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


def test_a_hubert_is_read_by_its_own_names(tmp_path):
    """HubertForCTC of transformers 5.23 is the same network: log-probabilities within 4e-6, of either norm layout."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    config, weights = sources.read(folder, "same")
    tensors = load_file(folder / "model.safetensors")
    theirs = {name.replace("wav2vec2.", "hubert.", 1): tensor for name, tensor in tensors.items()}
    save_file(theirs, folder / "model.safetensors")
    changed(folder / "config.json", model_type="hubert", conv_pos_batch_norm=False, feat_proj_layer_norm=True)
    found, same = sources.read(folder, "same")
    assert found == config
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    save_file({name: tensor for name, tensor in theirs.items() if "q_proj" not in name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hubert\.encoder\.layers\.0\.attention\.q_proj\.weight: missing"):
        sources.read(folder)


def test_parameters_of_base_in_pretraining():
    with torch.device("meta"):
        model = Wav2Vec2Pretraining(Wav2Vec2Config(), PretrainingConfig())
    assert sum(p.numel() for p in model.parameters()) == 95_044_608  # facebook/wav2vec2-base


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "`hidden_act` must be 'gelu', but is 'relu'"),
        ({"model_type": "wavlm"}, "`model_type` must be 'wav2vec2', but is 'wavlm'"),
        ({"model_type": "hubert", "conv_pos_batch_norm": True}, "`conv_pos_batch_norm` must be False, but is True"),
        ({"num_hidden_layers": 3}, r"wav2vec2\.encoder\.layers\.2\.attention\.q_proj\.weight: missing"),
        ({"hidden_size": 12}, r"masked_spec_embed: must be \[12\], but is \[24\]"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(tmp_path, change, message):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | change))
    with pytest.raises(CheckpointError, match=message):
        sources.read(folder)


def test_incomplete_folders_are_refused(tmp_path):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    (folder / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
    with pytest.raises(CheckpointError, match="must say 16000 Hz"):
        sources.read(folder)
    (folder / "preprocessor_config.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold model\.safetensors or pytorch_model\.bin"):
        sources.read(folder)
    torch.save({"lm_head.weight": None}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.bin: .* a dense tensor, but these are not: lm_head\.weight"):
        sources.read(folder)
    (folder / "model.safetensors").write_text("no tensors")
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        sources.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="must be JSON"):
        sources.read(folder)


def test_what_todays_transformers_writes_about_samples_is_read(tmp_path, caplog):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    extractor = json.loads((folder / "preprocessor_config.json").read_text())
    assert extractor["do_normalize"] is False
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor}))  # 5.x, in its place
    assert not sources.read(folder)[0].features.normalise
    assert not caplog.messages
    (folder / "processor_config.json").unlink()
    assert sources.read(folder)[0].features.normalise
    assert "must say in preprocessor_config.json whether samples are normalised" in caplog.text


def test_weights_that_are_no_numbers_are_named(tmp_path):
    """They gave empty transcripts, and a fine-tuning whose every step was skipped."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    config, weights = sources.read(folder, "x")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"][4] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"  lm_head\.bias: holds numbers that are not finite"):
        sources.read(folder)
    weights["head.bias"][1] = float("nan")
    checkpoint.save(tmp_path / "x.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"finite weights, but 1 tensor\(s\) do not, head\.bias first"):
        checkpoint.load_model(tmp_path / "x.pt")


def changed(path: Path, **options) -> None:
    """Set keys of a JSON file, which is made if it is not there; None removes one."""
    content = (json.loads(path.read_text()) if path.is_file() else {}) | options
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("file", "added"),
    [
        ("added_tokens.json", {"Z": 9, "<noise>": 10}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "Z"}, "10": {"content": "<noise>"}}}),
    ],
)
def test_letters_that_were_added_to_a_vocabulary_are_labels(tmp_path, file, added):
    """As `tokenizer.add_tokens` leaves them; their rows were dropped without a word."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    config, weights = sources.read(folder, "same")
    changed(folder / "vocab.json", Z=None)
    changed(folder / file, **added)
    found, same = sources.read(folder, "same")
    assert found.labels == config.labels == LABELS
    assert torch.equal(same["head.weight"], weights["head.weight"])


@pytest.mark.parametrize(
    ("others", "tokens"),
    [("additional_special_tokens", ["~"]), ("extra_special_tokens", ["~"]), ("extra_special_tokens", {"noise": "~"})],
)
def test_special_tokens_of_any_spelling_are_no_labels(tmp_path, others, tokens):
    """A string, or an entry that says more; in the tokenizer's file or in that of special tokens."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    expected = sources.read(folder, "same")[1]["head.weight"]
    vocabulary = {"<pad>": None, "PAD": 0, "<unk>": None, "UNKNOWN": 3, "|": None, "_": 4, "<s>": None, "~": 1}
    changed(folder / "vocab.json", **vocabulary)
    changed(folder / "tokenizer_config.json", pad_token=None, unk_token=None, bos_token=None)
    changed(folder / "special_tokens_map.json", pad_token="PAD", unk_token={"content": "UNKNOWN", "lstrip": False})
    changed(folder / "tokenizer_config.json", **{"word_delimiter_token": {"content": "_"}, others: tokens})
    config, weights = sources.read(folder, "same")
    assert config.labels == LABELS
    assert torch.equal(weights["head.weight"], expected)


def test_the_blank_is_the_tokenizers_padding_and_there_is_one(tmp_path):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    expected = sources.read(folder, "same")[1]["head.weight"]
    changed(folder / "config.json", pad_token_id=None)
    assert torch.equal(sources.read(folder, "same")[1]["head.weight"], expected)
    changed(folder / "config.json", pad_token_id=4)
    with pytest.raises(CheckpointError, match=r"row 4 \(`pad_token_id`\), '\|', and the .* padding '<pad>' is row 0"):
        sources.read(folder)
    changed(folder / "config.json", pad_token_id=None)
    changed(folder / "vocab.json", **{"<pad>": None})
    with pytest.raises(CheckpointError, match=r"which row of the head is the blank"):
        sources.read(folder)
    changed(folder / "vocab.json", E="5")
    with pytest.raises(CheckpointError, match=r"a number, but holds \{'E': '5'\}"):
        sources.read(folder)


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ({"É": 5}, r"\{'e': 5, 'é': 5\}"),
        ({"É": 10}, r"\{'é': 10\}"),
        ({"É": -1}, r"\{'é': -1\}"),
        ({"<pad>": None, "PAD": 12}, r"\{'the blank': 12\}"),
    ],
)
def test_every_token_has_a_row_of_its_own(tmp_path, added, found):
    """Two labels had one, and a row that is not there was said to be a head of another size."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    changed(folder / "config.json", pad_token_id=None)
    changed(folder / "tokenizer_config.json", pad_token="PAD" if "PAD" in added else None)
    changed(folder / "vocab.json", **added)
    with pytest.raises(CheckpointError, match=rf"vocab\.json must hold each token's own row, of the 10 .* {found}"):
        sources.read(folder)


def test_special_tokens_that_contradict_each_other_are_refused(tmp_path):
    """transformers takes one file's word in some versions, the other's in others."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    changed(folder / "special_tokens_map.json", pad_token="<s>")
    changed(folder / "tokenizer_config.json", pad_token={"content": "<pad>"})
    with pytest.raises(CheckpointError, match=r"must have one `pad_token`, but special.* says '<s>' and .* '<pad>'"):
        sources.read(folder)


def test_rows_that_no_token_names_are_told(tmp_path, caplog):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    changed(folder / "vocab.json", T=None, Z=None)
    assert sources.read(folder)[0].labels == (" ", "e", "a", "'")
    assert "must name all 10 rows of the head, but does not name [6, 9], which are left out" in caplog.text


def test_an_alphabet_without_a_space_may_have_a_delimiter_without_a_row(tmp_path):
    """As transformers 5 saves the tokenizer of a Chinese model."""
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    changed(folder / "vocab.json", **{"|": None, "中": 4})
    changed(folder / "added_tokens.json", **{"|": 10})
    assert sources.read(folder)[0].labels == ("中", *LABELS[1:])


def test_a_language_model_that_is_left_aside_is_told(tmp_path, caplog):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    sources.read(folder)
    assert caplog.text == ""
    (folder / "language_model").mkdir()
    sources.read(folder)
    assert "x/language_model, with which transformers decodes, is left aside" in caplog.text


@pytest.mark.parametrize("name", ["x.pt", "x.nemo", "x/model.safetensors", "x/pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    (folder / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 377607901\n")
    path = folder if name.startswith("x/") else tmp_path / name
    for read in (sources.read, sources.load_model):
        with pytest.raises(CheckpointError, match=r"is a pointer of Git LFS: fetch them, `git lfs pull`"):
            read(path)


@pytest.mark.parametrize(("before", "after"), [("", "module."), ("wav2vec2.", "wav2vec2._orig_mod.")])
def test_a_model_that_was_saved_inside_of_a_wrapper_is_read_too(tmp_path, before, after):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    expected = sources.read(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(before, after, 1): t for name, t in tensors.items()}, folder / "model.safetensors")
    found = sources.read(folder)[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_shards_are_read(tmp_path, file):
    folder = shutil.copytree(REFERENCES / "wav2vec2_base", tmp_path / "x")
    expected = sources.read(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    stem, suffix = file.split(".")
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"{stem}-{i:05d}-of-00002.{suffix}"
        where |= dict.fromkeys(part, shard)
        (save_file if suffix == "safetensors" else torch.save)({name: tensors[name] for name in part}, folder / shard)
    (folder / f"{file}.index.json").write_text(json.dumps({"weight_map": where}))
    found = sources.read(folder)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (folder / f"{stem}-00002-of-00002.{suffix}").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*: its weights cannot be read"):
        sources.read(folder)
    (folder / f"{file}.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold `weight_map`"):
        sources.read(folder)


def test_vocabularies_are_folded_to_characters():
    tokens = {"[PAD]": 4, "|": 0, "Ä": 1, "ß": 2, "[UNK]": 3}
    alphabet = fold(tokens, 4, "here")
    assert alphabet.labels == (" ", "ä", "ß")
    assert alphabet.rows == [0, 1, 2, 4]
    assert fold({"a": 0, "B": 1, "_": 2}, 2, "here", "_").labels == ("a", "B")  # both kinds: as it is
    assert fold({"I": 0, "İ": 1, "Ç": 2, "_": 3}, 3, "here").labels == ("ı", "i", "ç")  # Turkish
    assert fold({"A": 0, "ª": 1, "_": 2}, 2, "here").labels == ("a", "ª")  # small, but of no capital
    with pytest.raises(CheckpointError, match="one character per token, but has 'sch'"):
        fold({"a": 0, "sch": 1, "-": 2}, 2, "here")
    with pytest.raises(CheckpointError, match="folds two tokens"):
        fold({"|": 0, " ": 1, "-": 2}, 2, "here")


def test_the_folder_that_one_is_in_is_read_under_its_name(monkeypatch):
    monkeypatch.chdir(REFERENCES / "wav2vec2_base")
    assert sources.load_model(Path())[0].name == "wav2vec2_base"


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
    changed(tmp_path / "mine" / "added_tokens.json", é=10)
    with pytest.raises(CheckpointError, match=r"must be a new folder.* would read its added_tokens\.json"):
        huggingface.write(tmp_path / "mine", config, weights)


def test_a_folder_that_finds_no_room_is_as_it_was(room, tmp_path):
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    huggingface.write(tmp_path / "mine", config, weights)
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    with room(10_000), pytest.raises(WriteError, match=r"model\.safetensors could not be written, and is as it was"):
        huggingface.write(tmp_path / "mine", config, {name: tensor + 1 for name, tensor in weights.items()})
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_a_checkpoint_is_not_written_over_its_source(tmp_path, call):
    source = shutil.copy(REFERENCES / "quartznet.nemo", tmp_path / "x.nemo")
    before = source.read_bytes()
    status, _, err = call(main, "import", source, tmp_path / "." / "x.nemo")
    assert status == 1
    assert "must be another file than the source" in err
    assert call(main, "import", source, tmp_path / "x.pt")[0] == 0
    assert call(main, "to-nemo", tmp_path / "x.pt", tmp_path / "x.pt")[0] == 1
    assert source.read_bytes() == before
    assert sources.is_ours(tmp_path / "x.pt")


def test_a_label_that_would_pass_for_the_space_is_refused(tmp_path):
    config, weights = sources.read(REFERENCES / "wav2vec2_base")
    config = dataclasses.replace(config, labels=(" ", "|", *config.labels[2:]))
    with pytest.raises(CheckpointError, match=r"`labels` must not hold '\|'"):
        huggingface.write(tmp_path / "x", config, weights)


def test_a_pretrained_checkpoint_is_no_recogniser(tmp_path):
    with pytest.raises(CheckpointError, match=r"was pre-trained and knows no letters yet: fine-tune it"):
        sources.load_model(REFERENCES / "wav2vec2_pretraining")
