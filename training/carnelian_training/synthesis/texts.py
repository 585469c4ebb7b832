"""Sentences for synthesis: public-domain prose from Debian packages, or the user's own text files."""

import logging
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.data.manifest import read_manifest
from carnelian_training.text import spell_out, to_labels

logger = logging.getLogger(__name__)

MIN_CHARACTERS = 12
LIMITS = (100, 200)
"""The range, in characters, from which a sentence's limit is drawn; a longer sentence is divided. 200 characters take
11 to 16 s."""
LENGTHS = (20, 180)
"""The range, in characters, from which a length is drawn, up to which short sentences are joined."""

WORDNET_FILES = tuple(Path("/usr/share/wordnet") / f"data.{part}" for part in ("adj", "adv", "noun", "verb"))


@dataclass(frozen=True)
class Sentence:
    """A sentence to synthesise, of a length for one clip."""

    spoken: str
    """The text for the engine: numbers and abbreviations spelled out, simple punctuation."""
    labels: str
    """The transcript, in `LABEL_CHARACTERS`."""
    source: str
    """The name of the text that the sentence is from."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text and its share of a corpus."""

    name: str
    share: float
    """The weight of the text when the source of a clip is drawn."""
    read: Callable[[], Iterable[str]]
    """Returns the paragraphs of the text."""
    install_hint: Callable[[], str | None]
    """Returns the command that installs the text; None if it is installed."""


def choose_sources(names: Sequence[str] | None) -> list[Source]:
    """Find the texts with the given names, or all packaged texts that are installed.

    Args:
        names: Names of packaged sources and paths of text files. None: all packaged sources that are
            installed; the others are logged with how to install them.

    Raises:
        ValueError: A name is neither a packaged text nor a file, a named text is not installed, or no text is.
    """
    chosen = list(SOURCES.values()) if names is None else [_find(name) for name in names]
    hints = {source.name: hint for source in chosen if (hint := source.install_hint()) is not None}
    advice = "; ".join(f"{name}: {hint}" for name, hint in hints.items())
    if hints and names is not None:
        raise ValueError(f"every text that is named must be installed, but these are not: {advice}")
    if len(hints) == len(chosen):
        raise ValueError(f"at least one text must be installed, but none is: {advice}")
    if hints:
        logger.warning("the corpus is made without these texts, which are not installed: %s", advice)
    return [source for source in chosen if source.name not in hints]


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


def read_text_file(path: Path) -> Iterator[str]:
    """Return the paragraphs of a text file, divided by empty lines or, if there are none, one per line.

    Raises:
        ValueError: The file is not text in UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()  # an empty last line divides nothing
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, but is not: {error}") from error
    return iter(text.split("\n\n") if "\n\n" in text else text.splitlines())


def read_transcripts(manifest: Path) -> Iterator[str]:
    """Return the transcripts of a manifest, one by one."""
    return (clip.text for clip in read_manifest(manifest))


def read_austen() -> Iterator[str]:
    """Yield the paragraphs of Jane Austen's novels, without headings.

    Sense and Sensibility is left out: recordings of it are a common test of recognisers.
    """
    script = 'b <- janeaustenr::austen_books(); writeLines(as.character(b$text[b$book != "Sense & Sensibility"]))'
    for paragraph in _run("Rscript", "-e", script).split("\n\n"):
        if not re.match(r"\s*(?:chapter|volume|by jane austen)\b", paragraph, flags=re.IGNORECASE):
            yield paragraph


def read_bible() -> Iterator[str]:
    """Yield the chapters of the World English Bible's prose, without notes, headings and poetry."""
    chapter, text = "", ""
    for entry in _run("mod2imp", "engWEB2015eb").split("$$$")[1:]:
        verse, _, markup = entry.partition("\n")
        name, _, number = verse.partition(":")
        if name != chapter:
            yield text
            chapter, text = name, ""
        if number in ("", "0") or "<l " in markup:
            continue
        markup = re.sub(r"<(note|title|rdg|speaker)\b.*?</\1>", "", markup, flags=re.DOTALL)
        text += " " + re.sub(r"<[^>]*>", "", markup)
    yield text


def read_wordnet() -> Iterator[str]:
    """Yield WordNet's definitions and example sentences, each as a paragraph."""
    for path in WORDNET_FILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            _, divider, gloss = line.partition(" | ")
            if not divider:
                continue
            yield from re.findall(r'"([^"]+)"', gloss)
            definitions = re.sub(r"\([^)]*\)", "", re.sub(r'"[^"]*"?(?:-\s*[\w. ]+)?', "", gloss))
            yield from (part for part in definitions.split(";") if len(part) > 2 * MIN_CHARACTERS)


def _run(*command: str) -> str:
    # Rscript writes in the encoding of the locale.
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environment)
    return done.stdout


def _succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _austen_hint() -> str | None:
    installed = _succeeds("Rscript", "-e", 'find.package("janeaustenr")')
    return None if installed else "apt-get install r-base-core r-cran-janeaustenr"


def _bible_hint() -> str | None:
    installed = shutil.which("mod2imp") and Path("/usr/share/sword/mods.d/engWEB2015eb.conf").exists()
    return None if installed else "apt-get install libsword-utils sword-text-web"


def _wordnet_hint() -> str | None:
    return None if all(path.exists() for path in WORDNET_FILES) else "apt-get install wordnet-base"


SOURCES = {
    source.name: source
    for source in (
        Source(name="austen", share=50, read=read_austen, install_hint=_austen_hint),
        Source(name="web", share=15, read=read_bible, install_hint=_bible_hint),
        Source(name="wordnet", share=35, read=read_wordnet, install_hint=_wordnet_hint),
    )
}


def _find(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"a text must be one of {', '.join(SOURCES)} or a file, found {name!r}, which is neither")
    return Source(
        name=path.stem,
        share=50,
        read=lambda: read_transcripts(path) if path.suffix in (".jsonl", ".json") else read_text_file(path),
        install_hint=lambda: None,
    )
