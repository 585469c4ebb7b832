"""n-gram language models by KenLM, from text that is normalised like transcripts.

Input: texts. Output: a pruned KenLM binary for `--lm` of `carnelian-train evaluate` and `carnelian-export`, and a
report with its perplexity. KenLM's own programs estimate the model (modified Kneser-Ney); `setup/kenlm` builds them.
"""

import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from carnelian_training.ctc.language_model import read_ngrams
from carnelian_training.language_models.sentences import divide
from carnelian_training.replacement import replaced, write_text
from carnelian_training.synthesis.texts import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NgramReport:
    """How an n-gram model was made, and how well it predicts held-out sentences of the same texts."""

    texts: Sequence[str]
    """The names of packaged texts, and of files without folder and suffix."""
    exclude: Sequence[str]
    """The paths of the manifests whose transcripts are left out."""
    order: int
    prune: Sequence[int]
    sentences: int
    words: int
    vocabulary: int
    labels: str | None
    """The labels in which the words are written; None for English."""
    refused: int
    """The number of sentences left out for characters that are not labels, or numbers without a sure pronunciation."""
    excluded: int
    """The number of sentences left out because they are in the manifests of `exclude`."""
    held_out_sentences: int
    perplexity: float
    """The perplexity per word and sentence end on the held-out sentences, unknown words included."""
    unknown_share: float
    """The share of held-out words that the model does not know, 0 to 1."""
    bytes: int
    """The size of the KenLM binary in bytes."""


def build_ngram(
    sources: Sequence[Source],
    target: Path,
    *,
    order: int,
    prune: Sequence[int],
    vocabulary: int | None,
    exclude: Sequence[Path],
    labels: str | None,
) -> NgramReport:
    """Estimate, prune and write an n-gram language model.

    Args:
        sources: the texts.
        target: the KenLM binary to write, a trie with 8-bit probabilities; the report is written beside it, as JSON.
        order: length of the longest n-grams.
        prune: for each length, the count up to which n-grams are left out; the last one holds for longer n-grams.
        vocabulary: how many of the most frequent words the model knows; None: all.
        exclude: manifests whose transcripts are left out of the text.
        labels: the recogniser's labels, in which words are written; None for English.

    Raises:
        FileNotFoundError: KenLM's programs are not installed.
        ValueError: The texts are too small, or the settings do not fit together.
    """
    tools = {tool: find_tool(tool) for tool in ("lmplz", "build_binary", "query")}
    text = divide(sources, exclude, labels)
    if not text.used:
        raise ValueError("the texts must hold a sentence beside the one that is kept out, but hold that alone")
    counts = Counter(word for sentence in text.used for word in sentence.split())
    known = [word for word, _ in counts.most_common(vocabulary)]
    with tempfile.TemporaryDirectory() as scratch:
        arpa, words = Path(scratch) / "lm.arpa", Path(scratch) / "words"
        words.write_text("\n".join(known), encoding="utf-8")
        pruning = [*prune[:order], *[prune[-1]] * (order - len(prune))]
        estimate = [tools["lmplz"], "-o", order, "--prune", *pruning, "-T", scratch, "-S", "1G", "--arpa", arpa]
        # Discounts are estimated from n-grams with small counts. A small text may lack them; KenLM then uses defaults.
        _run([*estimate, "--limit_vocab_file", words, "--discount_fallback"], _lines(text.used))
        with replaced(target) as partial:
            _run([tools["build_binary"], "-q", 8, "-b", 8, "-a", 22, "trie", arpa, partial], "")
            said = _run([tools["query"], "-v", "summary", partial], _lines(text.held_out))
            perplexity = float(_find(r"Perplexity including OOVs:\s*(\S+)", said))
            num_unknown = int(_find(r"OOVs:\s*(\d+)\s*$", said))
            num_known = len(read_ngrams(partial)[1])  # fewer than `known` if single words are pruned
    unknown_share = num_unknown / max(sum(len(sentence.split()) for sentence in text.held_out), 1)
    if unknown_share > 0.5:
        logger.warning(
            "most of the held-out words should be known, but %.0f %% are unknown: give more text, with spaces in it",
            100 * unknown_share,
        )
    report = NgramReport(
        texts=[source.name for source in sources],
        exclude=[str(manifest) for manifest in exclude],
        order=order,
        prune=pruning,
        sentences=len(text.used),
        words=sum(counts.values()),
        vocabulary=num_known,
        labels=labels,
        refused=text.refused,
        excluded=text.excluded,
        held_out_sentences=len(text.held_out),
        perplexity=round(perplexity, 2),
        unknown_share=round(unknown_share, 4),
        bytes=target.stat().st_size,
    )
    write_text(target.with_suffix(".json"), json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n")
    return report


def find_tool(name: str) -> str:
    """Find a program of KenLM beside the running Python or in PATH.

    Raises:
        FileNotFoundError: The program is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name} of KenLM must be beside {sys.executable} or on PATH, but is not: run `make kenlm` in a "
            "clone of Carnelian, or build https://github.com/kpu/kenlm"
        )
    return found


def _lines(sentences: Sequence[str]) -> str:
    """Join sentences to lines that all end with a newline.

    `query` would count the words of a last line without a newline, but not add their log-probability.
    """
    return "".join(f"{sentence}\n" for sentence in sentences)


def _run(command: Sequence[object], text: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], input=text, capture_output=True, encoding="utf-8", check=False
    )
    name = Path(str(command[0])).name
    if done.returncode == -signal.SIGBUS:
        raise OSError(f"{name} was ended by SIGBUS, as where a file that is mapped into memory finds no room")
    if done.returncode:
        raise ValueError(f"{name} failed: {' '.join(done.stderr.strip().splitlines()[-3:])}")
    return done.stdout + done.stderr


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, flags=re.MULTILINE)
    if match is None:
        raise ValueError(f"KenLM's query must say {pattern!r}, but says {text[-300:]!r}")
    return match[1]
