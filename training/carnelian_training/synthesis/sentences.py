"""Sentences for synthesis: texts cut to the length of a clip, without what engines say in different ways."""

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from carnelian_training.synthesis.texts import MIN_CHARACTERS, Source
from carnelian_training.text import spell_out, to_labels

LIMITS = (100, 200)
"""The range, in characters, from which a sentence's limit is drawn; a longer sentence is divided. 200 characters take
11 to 16 s."""
LENGTHS = (20, 180)
"""The range, in characters, from which a length is drawn, up to which short sentences are joined."""


@dataclass(frozen=True)
class Sentence:
    """A sentence to synthesise, of a length for one clip."""

    spoken: str
    """The text for the engine: numbers and abbreviations spelled out, simple punctuation."""
    labels: str
    """The transcript, in `LABEL_CHARACTERS`."""
    source: str
    """The name of the text that the sentence is from."""


def read_sentences(sources: Iterable[Source]) -> dict[str, list[Sentence]]:
    """Read the sentences of each source, in order; a sentence that occurred before is left out.

    Raises:
        ValueError: A source has no usable sentence.
    """
    seen: set[str] = set()
    sentences: dict[str, list[Sentence]] = {}
    for source in sources:
        found = sentences.setdefault(source.name, [])  # two files may have the same name
        for paragraph in source.read():
            for spoken in split_sentences(paragraph):
                labels = _check(spoken)
                if labels is not None and labels not in seen:
                    seen.add(labels)
                    found.append(Sentence(spoken, labels, source.name))
        if not found:
            raise ValueError(f"{source.name} must hold sentences in English that no other text has, found none")
    return sentences


def split_sentences(paragraph: str) -> Iterator[str]:
    """Divide a paragraph into texts for one clip each: a few sentences, one, or some clauses of a long one."""
    text = spell_out(" ".join(paragraph.split()))
    text = re.sub(r"\s*(?:-{2,}|[\u2012-\u2015])\s*", ", ", text)
    # A quotation mark is silent; left in place it would hide the end of a sentence.
    text = re.sub(r"[\"“”„«»_*]|(?<![\w])'|(?<=[.,;:!?])'", "", text)
    text = re.sub(r"\s+(?=[,;:.!?])", "", text)
    text = re.sub(r"(?<=[.!?])[,;:]+|[,;:]+(?=[,;:.!?])", "", text)
    pieces = (piece for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text) for piece in _split_clauses(sentence))
    said, length = "", 0
    for piece in pieces:
        if said and len(said) + 1 + len(piece) <= length:
            said += " " + piece
            continue
        if said:
            yield said
        said, length = piece, _draw(piece, *LENGTHS)
    if said:
        yield said


def _draw(text: str, low: int, high: int) -> int:
    """Draw a number from `low` to `high` that depends only on the text, so that a text always gives the same pieces."""
    return low + zlib.crc32(text.encode()) % (high - low + 1)


def _split_clauses(sentence: str) -> Iterator[str]:
    """Cut a long sentence at the last punctuation mark within the limit; a stretch without one stays whole."""
    limit = _draw(sentence, *LIMITS)
    rest = sentence
    while rest:
        marks = [match.end() for match in re.finditer(r"[,;:](?=\s)", rest) if match.end() >= limit // 3]
        within = [mark for mark in marks if mark <= limit]
        cut = len(rest) if len(rest) <= limit or not marks else within[-1] if within else marks[0]
        piece = rest[:cut].strip(" ,;:-")
        if piece:
            yield piece if piece[-1] in ".!?" else piece + "."
        rest = rest[cut:].lstrip()


def _check(spoken: str) -> str | None:
    """Return the labels of a sentence, or None if an engine might say something else."""
    if not MIN_CHARACTERS <= len(spoken) <= LIMITS[1]:
        return None
    # Engines pronounce initials (U.S., e.g.), Roman numerals and words in capitals differently.
    if re.search(r"[A-Za-z]\.[A-Za-z]|\b[A-Z]\.|\b[A-Z]{2,}\b|\b(?!I\b|A\b|O\b)[A-Z]\b|[()\[\]{}/]", spoken):
        return None
    labels = to_labels(spoken)
    if labels is None or len(labels.split()) < 3 or max(map(len, labels.split())) > 20:
        return None
    return labels
