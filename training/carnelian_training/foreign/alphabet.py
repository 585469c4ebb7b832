"""Conversion of vocabularies of fairseq and Hugging Face to labels: one character each, no special tokens."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carnelian_training.config_errors import shown
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

WORD_DELIMITER = "|"
TURKISH = {"I": "\N{LATIN SMALL LETTER DOTLESS I}", "İ": "i"}
"""The lower case of the Turkish letters I and İ, used if a vocabulary has both."""
_SPECIAL = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")


@dataclass(frozen=True)
class Alphabet:
    """The labels of a vocabulary and their rows in the head."""

    labels: tuple[str, ...]
    rows: list[int]
    """The row of the head of each label and, last, of the blank."""


def fold(
    tokens: Mapping[str, int],
    blank: int,
    where: str,
    delimiter: str = WORD_DELIMITER,
    *,
    special: Collection[str] = (),
    lower: bool = False,
) -> Alphabet:
    """Convert a vocabulary to labels.

    The word delimiter becomes the space, special tokens are left out, and a vocabulary of only capitals becomes lower
    case. `tokens` has each token's row in the head, `blank` the blank's. `special` are special tokens, besides all in
    angle or square brackets. With `lower`, capitals become lower case even if the vocabulary also has small letters.

    Raises:
        CheckpointError: A token has more than one character, or two tokens give the same label.
    """
    kept = [(token, row) for token, row in sorted(tokens.items(), key=lambda pair: pair[1]) if row != blank]
    left_out = [t for t, _ in kept if t != delimiter and (t in special or _SPECIAL.fullmatch(t))]
    kept = [(" " if token == delimiter else token, row) for token, row in kept if token not in left_out]
    pieces = [token for token, _ in kept if len(token) != 1]
    if pieces:
        raise CheckpointError(f"{where} must have one character per token, but has {', '.join(map(shown, pieces[:9]))}")
    labels = [token for token, _ in kept]
    # Letters such as ß and ª do not count: their capital is not a single other character.
    has_small = any(label.islower() and len(label.upper()) == 1 and label.upper() != label for label in labels)
    if any(label.isupper() for label in labels) and (lower or not has_small):
        small = TURKISH if TURKISH.keys() <= set(labels) else {}
        labels = [small.get(label, label.lower() if len(label.lower()) == 1 else label) for label in labels]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise CheckpointError(f"{where} must have each label once, but folds two tokens into {twice}")
    if left_out:
        logger.info("%s: special tokens that are left out: %s", where, " ".join(left_out))
    if characters := [token for token in left_out if len(token) == 1]:
        logger.warning(
            "%s: transcripts lack %s, for the tokenizer calls them special; if they are characters of the language, "
            "take them out of its special tokens",
            *(where, " ".join(characters)),
        )
    return Alphabet(tuple(labels), [row for _, row in kept] + [blank])
