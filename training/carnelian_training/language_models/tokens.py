"""Tokenizers for language models: subwords or characters by SentencePiece, whose model is part of the checkpoint.

Subwords are SentencePiece's unigrams (Kudo 2018, arXiv:1804.10959). Every label is also a token, so no word is unknown,
and perplexities per word cover all of the text.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sentencepiece

UNKNOWN = 0
"""SentencePiece's token for unknown characters, which do not occur in text written in the labels."""
END = 1
"""The token that ends a sentence and begins the next one."""
MOST_SENTENCES = 1_000_000
"""The most sentences that a tokenizer is trained on, evenly chosen from the text; all are held in memory."""
_SPACE = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """The kind and the number of tokens."""

    kind: Literal["unigram", "char"] = "unigram"
    """The kind of tokens: `unigram` for subwords, `char` for characters."""
    size: int | None = None
    """The number of tokens; must be given for subwords, and only for them."""

    def __post_init__(self) -> None:
        if (self.kind == "char") != (self.size is None):
            raise ValueError(
                f"`size` must be given for subwords and for them alone, but is {self.size} for {self.kind}"
            )

    def vocabulary(self, labels: str) -> int:
        """Return the number of tokens for text in `labels`, with the tokens `UNKNOWN` and `END`."""
        return self.size or len({*labels, " "}) + 2


class Tokenizer:
    """A trained SentencePiece model."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def characters(self) -> set[str]:
        """The characters that the tokenizer knows, without the space."""
        pieces = map(self._processor.id_to_piece, range(END + 1, self._processor.vocab_size()))
        return set("".join(pieces)) - {_SPACE}

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each sentence, without the end."""
        encoded: list[list[int]] = self._processor.encode(list(sentences))
        return encoded

    def begins_word(self, token: int) -> bool:
        """Return whether a token is the first one of a word."""
        return str(self._processor.id_to_piece(token)).startswith(_SPACE)


def train_tokenizer(sentences: Sequence[str], config: TokenConfig, labels: str) -> Tokenizer:
    """Train a tokenizer on a text; the same text gives the same tokenizer.

    Each label becomes a token too.

    Raises:
        ValueError: The text is too small for the number of tokens.
    """
    every = max(1, -(-len(sentences) // MOST_SENTENCES))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences[::every]),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocabulary(labels),
            character_coverage=1.0,
            required_chars=labels.replace(" ", ""),
            normalization_rule_name="identity",  # `text.py` has normalised; SentencePiece's rules would add 240 kB
            unk_id=0,
            eos_id=END,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"the text must be large enough for {config.vocabulary(labels)} tokens, but {len(sentences):,} sentences "
            f"are not: {error}; lower `text.tokens.size`"
        ) from error
    return Tokenizer(model.getvalue())
