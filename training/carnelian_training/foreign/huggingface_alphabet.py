"""The alphabet of a folder of Hugging Face `transformers`, from all the files that define its tokens."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from carnelian_training.config_errors import shown
from carnelian_training.foreign.alphabet import WORD_DELIMITER, Alphabet, fold
from carnelian_training.foreign.huggingface_folder import read_if_there, read_json
from carnelian_training.foreign.options import Options
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)


def read_alphabet(path: Path, vocabulary: Options, options: Options, num_rows: int) -> Alphabet:
    """Read the labels and the blank of a recogniser, from its vocabulary and the tokens that were added to it.

    `vocabulary` has each token's row in the head: it is `vocab.json`, or one language's part of it. `options` is the
    content of `config.json`, and `num_rows` the size of the head.

    Raises:
        CheckpointError: The files contradict each other or the head, have tokens of several characters, or separate
            words by something other than a space.
    """
    file = path / "vocab.json"
    tokenizer = _tokenizer(path)
    added = read_if_there(path / "added_tokens.json")
    for row, entry in (tokenizer.get("added_tokens_decoder") or {}).items():
        added[_content(entry)] = int(row) if row.isdecimal() and len(row) < 10 else row
    tokens = added | vocabulary
    # Of several languages, an added token may be of another one.
    twice = {token: (row, added[token]) for token, row in vocabulary.items() if token in added and added[token] != row}
    if twice and vocabulary == read_json(file):
        raise CheckpointError(
            f"{path} must give each token one row of the head, but vocab.json and the tokens that were added to it "
            f"(added_tokens.json or `added_tokens_decoder` of tokenizer_config.json) give two: {shown(twice)}; "
            "transformers follows one or the other: correct the wrong one"
        )
    wrong = {token: row for token, row in tokens.items() if type(row) is not int}
    if wrong:
        raise CheckpointError(
            f"{path} must hold each token's row of the head, a number, but holds {shown(wrong)}, in vocab.json or "
            "among the added tokens"
        )
    named = {name: _content(token) for name, token in tokenizer.items() if name.endswith("_token") and token}
    delimiter = named.pop("word_delimiter_token", WORD_DELIMITER)
    # transformers 5 renames `additional_special_tokens` to `extra_special_tokens`, in transformers 4 a mapping.
    extra = tokenizer.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    others = [*(tokenizer.get("additional_special_tokens") or []), *extra]
    special = {*named.values(), *map(_content, others)}
    blank = _blank(tokens, named.get("pad_token", "<pad>"), options.get("pad_token_id"), path)
    if tokens.get(delimiter, 0) >= num_rows:  # transformers 5 adds a delimiter to every tokenizer, even without a row
        del tokens[delimiter]
    written = tokenizer.get("replace_word_delimiter_char", " ")
    if delimiter in tokens and written != " ":
        raise CheckpointError(
            f"{path}: `replace_word_delimiter_char` must be ' ', but is {written!r}: here words are apart by spaces"
        )
    lower = bool(tokenizer.get("do_lower_case"))
    alphabet = fold(tokens, blank, str(file), delimiter, special=special, lower=lower)
    counts = Counter(alphabet.rows)
    places = zip([*alphabet.labels, "the blank"], alphabet.rows, strict=True)
    if wrong := {label: row for label, row in places if counts[row] > 1 or row not in range(num_rows)}:
        raise CheckpointError(
            f"{file} must hold each token's own row, of the {num_rows} of the head, but holds {wrong}"
        )
    if unnamed := sorted(set(range(num_rows)) - set(tokens.values())):
        logger.warning(
            "%s must name all %d rows of the head, but does not name %s, which are left out", file, num_rows, unnamed
        )
    return alphabet


def _tokenizer(path: Path) -> Options:
    """Merge `special_tokens_map.json` and `tokenizer_config.json`.

    Raises:
        CheckpointError: The files contradict each other about the blank or the space.
    """
    special, config = (read_if_there(path / f"{name}.json") for name in ("special_tokens_map", "tokenizer_config"))
    for name in ("pad_token", "word_delimiter_token"):
        if not special.get(name) or not config.get(name):
            continue
        if (one := _content(special[name])) != (other := _content(config[name])):
            raise CheckpointError(
                f"{path} must have one `{name}`, but special_tokens_map.json says {one!r} and tokenizer_config.json "
                f"{other!r}, and transformers follows one or the other: correct the wrong one"
            )
    return special | config


def _blank(tokens: dict[str, int], pad: str, configured: int | None, path: Path) -> int:
    """Return the blank's row: the padding token's, which `config.json` gives for the loss, the tokenizer for decoding.

    Raises:
        CheckpointError: The two differ, or neither gives it.
    """
    row = tokens.get(pad, configured)
    if row is None:
        raise CheckpointError(
            f"{path} must say which row of the head is the blank: config.json has no `pad_token_id`, and no token is "
            f"{pad!r}, the tokenizer's padding"
        )
    if configured not in (None, row):
        name = next((token for token, other in tokens.items() if other == configured), "no token")
        raise CheckpointError(
            f"{path} must have one blank, but config.json says that it is row {configured} (`pad_token_id`), {name!r}, "
            f"and the tokenizer's padding {pad!r} is row {row}: correct `pad_token_id` there, if transformers decodes "
            "this model well"
        )
    return row


def _content(token: Any) -> str:
    """Return the text of a token, which may be given as `{content, special, ...}`."""
    return str(token.get("content") if isinstance(token, dict) else token)
