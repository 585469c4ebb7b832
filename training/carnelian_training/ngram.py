"""n-gram language models out of text, by KenLM: normalised as transcripts are, pruned, binary, with their perplexity.

In: texts. Out: a KenLM binary for `--lm` of `carnelian-train evaluate` and `carnelian-export`. KenLM's own programs do
the estimating (modified Kneser-Ney), `setup/kenlm` builds them.
"""

import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from carnelian_training.manifest import read_manifest
from carnelian_training.synthesis.texts import Source
from carnelian_training.text import spell_out, to_labels

logger = logging.getLogger(__name__)

HELD_OUT_EVERY = 100
"""One sentence in so many is kept for the perplexity."""
OVERLAP_WORDS = 6
"""A sentence that has so many words in a row with a transcript that is left out is left out with it."""


@dataclass(frozen=True, kw_only=True)
class NgramReport:
    """What a language model was made of, and how well it foretells sentences of the same texts that it was not."""

    order: int
    prune: Sequence[int]
    sentences: int
    words: int
    vocabulary: int
    refused: int
    """Sentences with characters or numbers that have no sure pronunciation."""
    excluded: int
    """Sentences in common with the manifests that were to be left out."""
    held_out_sentences: int
    perplexity: float
    """Per word and sentence end of the held-out sentences, unknown words included."""
    unknown_share: float
    """Of the held-out words."""
    bytes: int


def build_ngram(
    sources: Iterable[Source],
    target: Path,
    *,
    order: int = 3,
    prune: Sequence[int] = (0, 0, 1),
    vocabulary: int | None = None,
    exclude: Sequence[Path] = (),
) -> NgramReport:
    """Estimate, prune and write a language model.

    Args:
        sources: texts.
        target: the KenLM binary to write: a trie of 8-bit probabilities; its report is written beside it, as JSON.
        order: longest n-gram.
        prune: n-grams seen at most so often are left out, for each length; the last holds for longer ones.
        vocabulary: most frequent words to know; None for all.
        exclude: manifests whose transcripts must not be in the text.

    Raises:
        FileNotFoundError: KenLM's programs are not installed.
        ValueError: The texts hold too little, or the settings do not fit together.
    """
    tools = {tool: find_tool(tool) for tool in ("lmplz", "build_binary", "query")}
    excluded = {words for manifest in exclude for clip in read_manifest(manifest) for words in _runs(clip.text)}
    used: list[str] = []
    refused = shared = 0
    for sentence in read_text(sources):
        if sentence is None:
            refused += 1
        elif excluded.isdisjoint(_runs(sentence)):
            used.append(sentence)
        else:
            shared += 1
    held_out, used = used[::HELD_OUT_EVERY], [s for i, s in enumerate(used) if i % HELD_OUT_EVERY]
    counts = Counter(word for sentence in used for word in sentence.split())
    known = [word for word, _ in counts.most_common(vocabulary)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        arpa, words = Path(scratch) / "lm.arpa", Path(scratch) / "words"
        words.write_text("\n".join(known))
        pruning = [*prune[:order], *[prune[-1]] * (order - len(prune))]
        estimate = [tools["lmplz"], "-o", order, "--prune", *pruning, "-T", scratch, "-S", "1G", "--arpa", arpa]
        # Small texts may have no n-gram that is seen just once, twice, ...; the discounts are KenLM's usual ones then.
        _run([*estimate, "--limit_vocab_file", words, "--discount_fallback"], "\n".join(used))
        _run([tools["build_binary"], "-q", 8, "-b", 8, "-a", 22, "trie", arpa, target], "")
    said = _run([tools["query"], "-v", "summary", target], "\n".join(held_out))
    num_words = sum(len(sentence.split()) for sentence in held_out)
    report = NgramReport(
        order=order,
        prune=pruning,
        sentences=len(used),
        words=sum(counts.values()),
        vocabulary=len(known),
        refused=refused,
        excluded=shared,
        held_out_sentences=len(held_out),
        perplexity=round(float(_find(r"Perplexity including OOVs:\s*(\S+)", said)), 2),
        unknown_share=round(int(_find(r"OOVs:\s*(\d+)\s*$", said)) / max(num_words, 1), 4),
        bytes=target.stat().st_size,
    )
    target.with_suffix(".json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def read_text(sources: Iterable[Source]) -> Iterator[str | None]:
    """Sentences as labels, each once, in their order; None for one whose sound is not sure."""
    seen: set[str] = set()
    for source in sources:
        for paragraph in source.read():
            text = re.sub(r"-{2,}", ", ", spell_out(" ".join(paragraph.split())))
            for sentence in re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“']?[A-Z])", text):
                labels = to_labels(sentence)
                if labels is None and sentence.strip():
                    yield None
                elif labels is not None and labels not in seen:
                    seen.add(labels)
                    yield labels


def find_tool(name: str) -> str:
    """One of KenLM's programs: beside this Python, or on PATH.

    Raises:
        FileNotFoundError: It is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} of KenLM must be beside {sys.executable} or on PATH, but is not: run `make kenlm`, "
            "or build https://github.com/kpu/kenlm"
        )
    return found


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every run of `OVERLAP_WORDS` words; a shorter text is none."""
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


def _run(command: Sequence[object], text: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], input=text, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.strip().splitlines()[-3:])
        raise ValueError(f"{Path(str(command[0])).name} failed, perhaps as the text holds too little: {reason}")
    return done.stdout + done.stderr


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, flags=re.MULTILINE)
    if match is None:
        raise ValueError(f"KenLM's query must say {pattern!r}, but says {text[-300:]!r}")
    return match[1]
