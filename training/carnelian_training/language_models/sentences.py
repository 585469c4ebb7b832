"""Sentences out of texts for language models of any kind, written as transcripts are.

In: texts. Out: those to learn from and those to rate a model by, the same ones for n-grams and networks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.data.manifest import read_manifest
from carnelian_training.synthesis.texts import Source
from carnelian_training.text import spell_out, to_given_labels, to_labels

HELD_OUT_EVERY = 100
"""One sentence in so many is kept for the perplexity."""
OVERLAP_WORDS = 6
"""A sentence that has so many words in a row with a transcript that is left out is left out with it; so is one that is
a shorter transcript as a whole."""

_END = re.compile(
    r"(?:(?<=[.!?؟۔।॥])[\"”“'»«]?\s+|(?<=[。！？])[”」』]?\s*)(?=[\"“']?[¿¡«»„「『]*([^\W\d_]))"  # noqa: RUF001
)
"""What is between two sentences, with the first letter of the next one, unless that is lower."""


@dataclass(frozen=True)
class Sentences:
    """What texts hold, in their order, each sentence once."""

    used: list[str]
    held_out: list[str]
    refused: int
    """Those with characters that the labels do not have, or numbers that have no sure pronunciation."""
    excluded: int
    """Those in common with the manifests that were to be left out."""


def divide(sources: Iterable[Source], exclude: Sequence[Path] = (), labels: str | None = None) -> Sentences:
    """Read texts and keep one sentence in :data:`HELD_OUT_EVERY` out of training.

    Args:
        sources: texts.
        exclude: manifests whose transcripts must not be in the text.
        labels: of the recogniser, which the sentences are written in; None for English.

    Raises:
        ValueError: No sentence is left.
    """
    transcripts = [clip.text for manifest in exclude for clip in read_manifest(manifest)]
    excluded = {words for text in transcripts for words in _runs(_normalise(text, labels) or text)}
    kept: list[str] = []
    refused = shared = 0
    for sentence in read_text(sources, labels):
        if sentence is None:
            refused += 1
        elif excluded.isdisjoint(_runs(sentence)):
            kept.append(sentence)
        else:
            shared += 1
    if not kept:
        raise ValueError(
            "the texts must hold sentences that can be used, but hold none: "
            f"{refused} cannot be written in the labels (another language than English needs its own), {shared} are "
            "in the manifests to exclude"
        )
    used = [sentence for i, sentence in enumerate(kept) if i % HELD_OUT_EVERY]
    return Sentences(used, kept[::HELD_OUT_EVERY], refused, shared)


def read_text(sources: Iterable[Source], labels: str | None = None) -> Iterator[str | None]:
    """Sentences as labels, each once, in their order; None for one that cannot be written in them."""
    seen: set[str] = set()
    for source in sources:
        for paragraph in source.read():
            text = " ".join(paragraph.split())
            for sentence in _split(re.sub(r"-{2,}", ", ", spell_out(text) if labels is None else text)):
                written = _normalise(sentence, labels)
                if written is None and sentence.strip():
                    yield None
                elif written is not None and written not in seen:
                    seen.add(written)
                    yield written


def _split(text: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(text):
        if not end[1].islower():
            yield text[start : end.start()]
            start = end.end()
    yield text[start:]


def _normalise(text: str, labels: str | None) -> str | None:
    return to_labels(text) if labels is None else to_given_labels(text, labels)


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every run of `OVERLAP_WORDS` words; of a shorter text the whole of it."""
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(max(1, len(words) - OVERLAP_WORDS + 1))}
