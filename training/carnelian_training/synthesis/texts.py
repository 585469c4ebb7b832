"""Texts for corpora and language models: public-domain prose from Debian packages, or the user's own files."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.data.manifest import read_manifest

logger = logging.getLogger(__name__)

MIN_CHARACTERS = 12
"""The length, in characters, of the shortest sentence."""
MAX_LINES = 20
"""Paragraphs between empty lines have fewer lines than this on average."""
SPACED_ENDS = ".!?…؟۔।॥։።။។"  # noqa: RUF001
"""The marks that end a sentence if a space follows."""
UNSPACED_ENDS = "。！？"  # noqa: RUF001
"""The marks that end a sentence without one."""
CLOSING = "\"'”’“‘»«›‹」』"  # noqa: RUF001
"""The quotation marks that may stand behind the mark that ends a sentence."""
WORDNET_FILES = tuple(Path("/usr/share/wordnet") / f"data.{part}" for part in ("adj", "adv", "noun", "verb"))


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
        logger.warning("these texts are not installed, and left out: %s", advice)
    return [source for source in chosen if source.name not in hints]


def read_text_file(path: Path) -> Iterator[str]:
    """Return the paragraphs of a text file.

    They are divided by empty lines if most then end like a sentence and their mean length is below `MAX_LINES`.
    Otherwise each line is one, so that an empty line between sentences or documents joins nothing.

    Raises:
        ValueError: The file is not text in UTF-8.
    """
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise ValueError(f"{path} must be text in UTF-8, but is packed; unpack it: gzip -d")
    try:
        text = path.read_text(encoding="utf-8-sig").strip()  # an empty last line divides nothing
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, but is not: {error}") from error
    blocks = re.split(r"\n\s*\n", text)
    return iter(blocks if _are_paragraphs(blocks) else text.splitlines())


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


def _are_paragraphs(blocks: Sequence[str]) -> bool:
    """Whether blocks between empty lines are wrapped prose or verse, and not lists of sentences."""
    ends, behind = tuple(SPACED_ENDS + UNSPACED_ENDS), CLOSING + ")]_* \n"  # Gutenberg's texts mark italics by _
    num_ended = sum(block.rstrip(behind).endswith(ends) for block in blocks)
    num_lines = sum(block.count("\n") + 1 for block in blocks)
    return len(blocks) > 1 and num_ended >= len(blocks) / 2 and num_lines < MAX_LINES * len(blocks)


def _run(*command: str) -> str:
    # Rscript writes in the encoding of the locale.
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environment)
    if not done.stdout:
        raise RuntimeError(
            f"{command[0]} must print a text, but printed nothing and reported no error, as Rscript does when the disk "
            "of its temporary files is full: make room there, or name another folder in TMPDIR"
        )
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
