"""The tokens of Hugging Face's folders as labels; references/wav2vec2_models.py made the folder."""

import math

import pytest
import torch
from carnelian_training.foreign import sources
from carnelian_training.foreign.alphabet import fold
from carnelian_training.weight_files import CheckpointError

LABELS = (" ", "e", "t", "a", "'", "z")


@pytest.mark.parametrize(
    ("file", "added"),
    [
        ("added_tokens.json", {"Z": 9, "<noise>": 10}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "Z"}, "10": {"content": "<noise>"}}}),
    ],
)
def test_letters_that_were_added_to_a_vocabulary_are_labels(hf_folder, file, added, set_keys):
    """As `tokenizer.add_tokens` leaves them; their rows were dropped without a word."""
    config, weights = sources.read(hf_folder, "same")
    set_keys(hf_folder / "vocab.json", Z=None)
    set_keys(hf_folder / file, **added)
    found, same = sources.read(hf_folder, "same")
    assert found.labels == config.labels == LABELS
    assert torch.equal(same["head.weight"], weights["head.weight"])


@pytest.mark.parametrize(
    ("file", "added"),
    [
        ("added_tokens.json", {"Z": 7}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "Z"}, "8": {"content": "'"}}}),
    ],
)
def test_a_token_that_was_added_in_another_row_is_refused(hf_folder, file, added, set_keys):
    """Versions of transformers differ in which row they take."""
    set_keys(hf_folder / file, **added)
    with pytest.raises(CheckpointError, match=r"give two: \{'Z': \(9, 7\)\}; .* correct the wrong one"):
        sources.read(hf_folder)


@pytest.mark.parametrize(
    ("others", "tokens"),
    [("additional_special_tokens", ["~"]), ("extra_special_tokens", ["~"]), ("extra_special_tokens", {"noise": "~"})],
)
def test_special_tokens_of_any_spelling_are_no_labels(hf_folder, others, tokens, set_keys):
    """A string, or an entry that says more; in the tokenizer's file or in that of special tokens."""
    expected = sources.read(hf_folder, "same")[1]["head.weight"]
    vocabulary = {"<pad>": None, "PAD": 0, "<unk>": None, "UNKNOWN": 3, "|": None, "_": 4, "<s>": None, "~": 1}
    set_keys(hf_folder / "vocab.json", **vocabulary)
    set_keys(hf_folder / "tokenizer_config.json", pad_token=None, unk_token=None, bos_token=None)
    set_keys(hf_folder / "special_tokens_map.json", pad_token="PAD", unk_token={"content": "UNKNOWN", "lstrip": False})
    set_keys(hf_folder / "tokenizer_config.json", **{"word_delimiter_token": {"content": "_"}, others: tokens})
    config, weights = sources.read(hf_folder, "same")
    assert config.labels == LABELS
    assert torch.equal(weights["head.weight"], expected)


def test_the_blank_is_the_tokenizers_padding_and_there_is_one(hf_folder, set_keys):
    expected = sources.read(hf_folder, "same")[1]["head.weight"]
    set_keys(hf_folder / "config.json", pad_token_id=None)
    assert torch.equal(sources.read(hf_folder, "same")[1]["head.weight"], expected)
    set_keys(hf_folder / "config.json", pad_token_id=4)
    with pytest.raises(CheckpointError, match=r"row 4 \(`pad_token_id`\), '\|', and the .* padding '<pad>' is row 0"):
        sources.read(hf_folder)
    set_keys(hf_folder / "config.json", pad_token_id=None)
    set_keys(hf_folder / "vocab.json", **{"<pad>": None})
    with pytest.raises(CheckpointError, match=r"which row of the head is the blank"):
        sources.read(hf_folder)
    set_keys(hf_folder / "vocab.json", E="5")
    with pytest.raises(CheckpointError, match=r"a number, but holds \{'E': '5'\}"):
        sources.read(hf_folder)
    set_keys(hf_folder / "vocab.json", E=True)
    with pytest.raises(CheckpointError, match=r"a number, but holds \{'E': True\}"):
        sources.read(hf_folder)
    set_keys(hf_folder / "vocab.json", E=math.nan)
    with pytest.raises(CheckpointError, match=r"a number, but holds \{'E': nan\}"):
        sources.read(hf_folder)
    set_keys(hf_folder / "vocab.json", E=5)
    set_keys(hf_folder / "tokenizer_config.json", added_tokens_decoder={"x": {"content": "ü"}})
    with pytest.raises(CheckpointError, match=r"x must hold .* a number, but holds \{'ü': 'x'\}, in vocab\.json or am"):
        sources.read(hf_folder)
    set_keys(hf_folder / "tokenizer_config.json", added_tokens_decoder={"9" * 5000: {"content": "ü"}})
    with pytest.raises(CheckpointError, match=r"a number, but holds \{'ü': '999"):
        sources.read(hf_folder)


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ({"É": 5}, r"\{'e': 5, 'é': 5\}"),
        ({"É": 10}, r"\{'é': 10\}"),
        ({"É": -1}, r"\{'é': -1\}"),
        ({"<pad>": None, "PAD": 12}, r"\{'the blank': 12\}"),
    ],
)
def test_every_token_has_a_row_of_its_own(hf_folder, added, found, set_keys):
    """Two labels had one, and a row that is not there was said to be a head of another size."""
    set_keys(hf_folder / "config.json", pad_token_id=None)
    set_keys(hf_folder / "tokenizer_config.json", pad_token="PAD" if "PAD" in added else None)
    set_keys(hf_folder / "vocab.json", **added)
    with pytest.raises(CheckpointError, match=rf"vocab\.json must hold each token's own row, of the 10 .* {found}"):
        sources.read(hf_folder)


def test_a_special_token_without_content_is_no_label(hf_folder, set_keys):
    set_keys(hf_folder / "tokenizer_config.json", unk_token={"special": True})
    assert sources.read(hf_folder)[0].labels == LABELS


def test_a_character_that_is_a_special_token_is_warned_of(hf_folder, caplog, set_keys):
    sources.read(hf_folder)
    assert not caplog.messages
    caplog.set_level("INFO")
    set_keys(hf_folder / "tokenizer_config.json", additional_special_tokens=["Z"])
    assert sources.read(hf_folder)[0].labels == LABELS[:-1]
    assert "vocab.json: special tokens that are left out: <s> </s> <unk> Z" in caplog.text
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "vocab.json: transcripts lack Z, for the tokenizer calls them special" in warning.getMessage()


def test_special_tokens_that_contradict_each_other_are_refused(hf_folder, set_keys):
    """transformers takes one file's word in some versions, the other's in others."""
    set_keys(hf_folder / "special_tokens_map.json", pad_token="<s>")
    set_keys(hf_folder / "tokenizer_config.json", pad_token={"content": "<pad>"})
    with pytest.raises(CheckpointError, match=r"must have one `pad_token`, but special.* says '<s>' and .* '<pad>'"):
        sources.read(hf_folder)


def test_rows_that_no_token_names_are_told(hf_folder, caplog, set_keys):
    set_keys(hf_folder / "vocab.json", T=None, Z=None)
    assert sources.read(hf_folder)[0].labels == (" ", "e", "a", "'")
    assert "must name all 10 rows of the head, but does not name [6, 9], which are left out" in caplog.text


def test_an_alphabet_without_a_space_may_have_a_delimiter_without_a_row(hf_folder, set_keys):
    """As transformers 5 saves the tokenizer of a Chinese model."""
    set_keys(hf_folder / "vocab.json", **{"|": None, "中": 4})
    set_keys(hf_folder / "added_tokens.json", **{"|": 10})
    assert sources.read(hf_folder)[0].labels == ("中", *LABELS[1:])


def test_words_are_apart_by_spaces(hf_folder, set_keys):
    """Japanese models may write them together; theirs were heard with spaces."""
    set_keys(hf_folder / "tokenizer_config.json", replace_word_delimiter_char="")
    with pytest.raises(CheckpointError, match=r"`replace_word_delimiter_char` must be ' ', but is ''"):
        sources.read(hf_folder)
    set_keys(hf_folder / "vocab.json", **{"|": None, "中": 4})
    assert sources.read(hf_folder)[0].labels == ("中", *LABELS[1:])


def test_capitals_among_small_letters_become_small_if_the_tokenizer_says_so(hf_folder, set_keys):
    set_keys(hf_folder / "vocab.json", Z=None, é=9)
    assert sources.read(hf_folder)[0].labels == (" ", "E", "T", "A", "'", "é")
    set_keys(hf_folder / "tokenizer_config.json", do_lower_case=True)
    assert sources.read(hf_folder)[0].labels == (" ", "e", "t", "a", "'", "é")
    set_keys(hf_folder / "vocab.json", é=None, e=9)
    with pytest.raises(CheckpointError, match=r"folds two tokens into \['e'\]"):
        sources.read(hf_folder)


def test_vocabularies_are_folded_to_characters():
    tokens = {"[PAD]": 4, "|": 0, "Ä": 1, "ß": 2, "[UNK]": 3}
    alphabet = fold(tokens, 4, "here")
    assert alphabet.labels == (" ", "ä", "ß")
    assert alphabet.rows == [0, 1, 2, 4]
    assert fold({"a": 0, "B": 1, "_": 2}, 2, "here", "_").labels == ("a", "B")  # both kinds: as it is
    assert fold({"I": 0, "İ": 1, "Ç": 2, "_": 3}, 3, "here").labels == ("ı", "i", "ç")  # Turkish
    assert fold({"[SPACE]": 0, "a": 1, "_": 2}, 2, "here", "[SPACE]").labels == (" ", "a")
    assert fold({"A": 0, "ª": 1, "_": 2}, 2, "here").labels == ("a", "ª")  # small, but of no capital
    with pytest.raises(CheckpointError, match="one character per token, but has 'sch'"):
        fold({"a": 0, "sch": 1, "-": 2}, 2, "here")
    with pytest.raises(CheckpointError, match="folds two tokens"):
        fold({"|": 0, " ": 1, "-": 2}, 2, "here")
