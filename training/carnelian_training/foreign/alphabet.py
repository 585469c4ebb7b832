"""Vocabularies of fairseq and Hugging Face as labels of ours: one character each, the blank last, nothing special."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)

WORD_DELIMITER = "|"
TURKISH = {"I": "\N{LATIN SMALL LETTER DOTLESS I}", "İ": "i"}
"""What folds otherwise where both letters are there."""
_SPECIAL = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")


@dataclass(frozen=True)
class Alphabet:
    """Which rows of a head are which labels."""

    labels: tuple[str, ...]
    rows: list[int]
    """Of each label, and of the blank last."""


def fold(
    tokens: Mapping[str, int], blank: int, where: str, delimiter: str = WORD_DELIMITER, *, lower: bool = False
) -> Alphabet:
    """Fold a vocabulary: the delimiter of words is a space, special tokens are left out, capitals alone become small.

    Args:
        tokens: each token's row of the head.
        blank: the blank's row.
        where: opens messages.
        delimiter: of words.
        lower: whether capitals become small beside small letters too.

    Raises:
        CheckpointError: A token is a word piece, or two are one label.
    """
    kept = [(token, row) for token, row in sorted(tokens.items(), key=lambda pair: pair[1]) if row != blank]
    left_out = [token for token, _ in kept if _SPECIAL.fullmatch(token)]
    kept = [(" " if token == delimiter else token, row) for token, row in kept if token not in left_out]
    pieces = [token for token, _ in kept if len(token) != 1]
    if pieces:
        raise CheckpointError(f"{where} must have one character per token, but has {', '.join(map(repr, pieces[:9]))}")
    labels = [token for token, _ in kept]
    # Letters like ß and ª have no capital of one character.
    has_small = any(label.islower() and len(label.upper()) == 1 and label.upper() != label for label in labels)
    if any(label.isupper() for label in labels) and (lower or not has_small):
        small = TURKISH if TURKISH.keys() <= set(labels) else {}
        labels = [small.get(label, label.lower() if len(label.lower()) == 1 else label) for label in labels]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise CheckpointError(f"{where} must have each label once, but folds two tokens into {twice}")
    if left_out:
        logger.info("%s: special tokens that are left out: %s", where, " ".join(left_out))
    return Alphabet(tuple(labels), [row for _, row in kept] + [blank])
