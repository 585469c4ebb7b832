"""Sentences for language models of any kind, from texts, normalised like transcripts.

Input: texts. Output: sentences for training and held-out sentences, the same for n-gram models and networks.
"""

import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.data.manifest import read_manifest
from carnelian_training.synthesis.texts import CLOSING, SOURCES, SPACED_ENDS, UNSPACED_ENDS, Source
from carnelian_training.text import LABEL_CHARACTERS, spell_out, to_given_labels, to_labels

logger = logging.getLogger(__name__)

HELD_OUT_EVERY = 100
"""One of this many sentences is held out of training, to measure perplexity."""
OVERLAP_WORDS = 6
"""A sentence is excluded if it shares this many words in a row with an excluded transcript, or equals a shorter one."""

_GREEK = "\u0370-\u03ff\u1f00-\u1fff"  # its question mark is a semicolon
_END = re.compile(
    rf"(?:(?:(?<=[{SPACED_ENDS}])|(?<=[{_GREEK}];))[{CLOSING}]?\s+|(?<=[{UNSPACED_ENDS}])[{CLOSING}]?\s*)"
    r"(?=[\"“'‘‚]?[¿¡«»‹›„「『]*([^\W\d_]))"  # noqa: RUF001
)
"""The boundary of two sentences, and the first letter of the next one, which must not be in lower case."""

_BRACKETS = str.maketrans("()[]{}*", " " * 7)
"""Makes spaces of brackets. In our own texts, an author's or editor's, they stand for no noise or laughter."""


@dataclass(frozen=True)
class Sentences:
    """The sentences of texts, in order, each one once."""

    used: list[str]
    """The sentences for training."""
    held_out: list[str]
    """The sentences to measure perplexity on."""
    refused: int
    """The number of sentences left out for characters that are not labels, or numbers without a sure pronunciation."""
    excluded: int
    """The number of sentences left out because they are in the excluded manifests."""


def divide(sources: Iterable[Source], exclude: Sequence[Path] = (), labels: str | None = None) -> Sentences:
    """Read texts and hold one of :data:`HELD_OUT_EVERY` sentences out of training.

    The transcripts of the manifests in `exclude` are left out. Sentences are written in the recogniser's `labels`;
    None: English.

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
    if refused > len(kept):
        logger.warning(
            "most sentences of the texts should be used, but %d of %d cannot be written in the labels, %r: another "
            "language than English needs its own",
            refused,
            refused + shared + len(kept),
            labels or LABEL_CHARACTERS,
        )
    used = [sentence for i, sentence in enumerate(kept) if i % HELD_OUT_EVERY]
    return Sentences(used, kept[::HELD_OUT_EVERY], refused, shared)


def read_text(sources: Iterable[Source], labels: str | None = None) -> Iterator[str | None]:
    """Yield the sentences of texts in the labels, in order, each once; None for one that cannot be written in them."""
    seen: set[str] = set()
    for source in sources:
        for paragraph in source.read():
            text = unicodedata.normalize("NFC", " ".join(paragraph.split()))  # for `_GREEK`: an accent is no letter
            for sentence in _split(re.sub(r"-{2,}", ", ", spell_out(text) if labels is None else text)):
                written = _normalise(sentence.translate(_BRACKETS) if source.name in SOURCES else sentence, labels)
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
    """Return every run of `OVERLAP_WORDS` words; for a shorter text, the whole text."""
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(max(1, len(words) - OVERLAP_WORDS + 1))}
