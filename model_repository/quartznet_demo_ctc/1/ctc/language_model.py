"""A word n-gram language model: an ARPA file (also .gz) or KenLM binary, read and queried through KenLM.

This module keeps the model's vocabulary as a prefix tree, and a cache of KenLM's answers.
"""

import codecs
import gzip
import logging
import math
import mmap
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kenlm
import numpy as np

from .prefix_tree import build_tree, encode
from .spelling import FINAL_SIGMA, SIGMA, choose_cases, has_one_sigma, quote

logger = logging.getLogger(__name__)

LN_10 = math.log(10)
NEVER = -99.0
"""The decimal logarithm that SRILM writes for 0; KenLM gives -100 to <unk> if a file does not have it."""
MAX_ANSWERS = 1_000_000
"""The most cached answers of KenLM, with their contexts; about 200 MB."""
MAX_TIMES_PACKED = 100
"""The largest ratio of a .gz's unpacked to packed size: gzip reaches 1,030, n-grams of number words alone 30."""
MANY_WORDS = 10_000
"""The size of a vocabulary in which some word should have each letter; a small one may lack rare ones by chance."""
SMALL = 1 << 20
"""The unpacked size in bytes that is always allowed, whatever the ratio."""
_COUNT = re.compile(r"ngram +[0-9]+=\s*([0-9]{1,18})\s*$")
_MARKS = ("<s>", "</s>", "<unk>", "<UNK>")
_BINARY = b"mmap lm http"  # of any version, or unfinished
_VERSION_5 = b"mmap lm http://kheafield.com/code format version 5"


class LanguageModelError(ValueError):
    """The language model cannot be used with this recogniser; the message says why."""


class LanguageModel:
    """Natural log-probabilities of words given the words before, for words spelled in the recogniser's labels.

    Attributes:
        tree: [states, labels] int32; the vocabulary as a prefix tree, see :func:`build_tree`. The last state stands
            for letters that begin no word.
        word: [states] int32; the number of the word that ends in a state, or -1.
        best: [states] float64; log-probability of the most probable unigram that begins with the state's letters.
    """

    def __init__(self, path: Path, labels: Sequence[str]) -> None:
        """Load a model.

        Args:
            path: an ARPA file, plain or .gz, or a KenLM binary. A model in upper case also fits labels in lower case,
                and the reverse.
            labels: one character each.

        Raises:
            LanguageModelError: The file is not a language model or has words that the labels cannot spell or without a
                probability, or no label is the space.
        """
        if " " not in labels:
            raise LanguageModelError(
                f"{path} is of words, so one label must be the space, but the labels are {''.join(labels)!r:.200}"
            )
        self._model, self._words = read_ngrams(path)
        to_labels, self._from_labels = match_case(self._words, labels)
        spelled = [to_labels(word) for word in self._words]
        try:
            codes = encode(spelled, labels)
        except ValueError as error:
            raise LanguageModelError(
                f"{path} does not fit the recogniser: {_in_no_case(self._words, labels) or error}"
            ) from error
        absent = sorted(set(filter(str.isalpha, labels)) - set("".join(spelled)))
        if absent and len(spelled) >= MANY_WORDS:
            logger.warning(
                "%s should have words with every label, but has none with %.200s, so those are unknown to it; where a "
                "change of its case has lost them, as it may ß, İ or ς, make it with `carnelian-train ngram --labels`",
                *(path, " ".join(absent)),
            )
        self.tree, parents, ends = build_tree(codes, len(labels))
        self.word = np.full(len(self.tree), -1, np.int32)
        self.word[ends] = np.arange(len(ends))
        self.best = np.full(len(self.tree), -np.inf)
        scores, unknown, offset = rate_words(self._model, self._words, path)
        self.best[ends] = np.multiply(scores, LN_10)
        for state in range(len(parents) - 1, 0, -1):  # deepest first
            self.best[parents[state]] = max(self.best[parents[state]], self.best[state])
        self._unknown_offset = offset * LN_10
        self.best[-1] = unknown * LN_10 + self._unknown_offset
        self._forget()

    def _forget(self) -> None:
        start = kenlm.State()
        self._model.BeginSentenceWrite(start)
        self._states = [start]
        self._numbers = {start: 0}
        self._answers: dict[tuple[int, int], tuple[float, int]] = {}

    def start(self) -> int:
        """Return the context at the start of a sentence; contexts of earlier sentences become invalid."""
        if len(self._answers) > MAX_ANSWERS:
            self._forget()
        return 0

    def score(self, context: int, word: int) -> tuple[float, int]:
        """Return the natural log-probability of a word (-1: unknown) in a context, and the context after it."""
        answer = self._answers.get((context, word))
        if answer is None:
            after = kenlm.State()
            spelled, offset = (self._words[word], 0.0) if word >= 0 else ("<unk>", self._unknown_offset)
            log_prob = finite(self._model.BaseScore(self._states[context], spelled, after)) * LN_10 + offset
            number = self._numbers.setdefault(after, len(self._states))
            if number == len(self._states):
                self._states.append(after)
            answer = self._answers[context, word] = (log_prob, number)
        return answer

    def rate(self, text: str) -> tuple[float, int]:
        """Return the natural log-probability of a whole text, its end included, and its number of unknown words."""
        scores = list(self._model.full_scores(self._from_labels(text)))
        unknown = sum(is_unknown for _, _, is_unknown in scores)
        return sum(finite(log_prob) for log_prob, _, _ in scores) * LN_10 + unknown * self._unknown_offset, unknown

    def end(self, context: int) -> float:
        """Return the natural log-probability of the sentence's end in a context."""
        return finite(self._model.BaseScore(self._states[context], "</s>", kenlm.State())) * LN_10


def finite(log_prob: float) -> float:
    """Return NEVER for minus infinity, which some toolkits write for 0: at a weight of 0 it would become NaN."""
    return NEVER if log_prob == -math.inf else log_prob


def rate_words(model: kenlm.Model, words: Sequence[str], path: Path) -> tuple[list[float], float, float]:
    """Return decimal logarithms: each word's unigram probability, <unk>'s, and what is to be added to unknown words.

    Raises:
        LanguageModelError: A probability is above 1, or not a number. `path` is the model's file, for messages.
    """
    nowhere, after = kenlm.State(), kenlm.State()
    model.NullContextWrite(nowhere)
    marked = [*words, "</s>", "<unk>"]
    log_probs = [finite(model.BaseScore(nowhere, word, after)) for word in marked]
    for word, log_prob in zip(marked, log_probs, strict=True):
        if not log_prob <= 0:  # nor NaN
            raise LanguageModelError(
                f"{path} must give each word a logarithm of 0 at most, but gives {word!r} {log_prob}; make it anew"
            )
    *scores, _, unknown = log_probs
    if unknown > NEVER:
        return scores, unknown, 0.0
    # With a probability of about 0, no boost could make up for a hot word that the model does not know.
    logger.warning("%s has no <unk>: unknown words get the probability of its least likely one", path)
    return scores, unknown, min((score for score in scores if score > NEVER), default=unknown) - unknown


def read_ngrams(path: Path) -> tuple[kenlm.Model, list[str]]:
    """Read an ARPA file, plain or .gz, or a KenLM binary; return the model and its words, without marks such as <s>.

    Raises:
        LanguageModelError: The file is not a language model, is far larger unpacked, counts n-grams or has words in a
            way that cannot be, or is a binary that is cut short or was built without its words.
    """
    config = kenlm.Config()
    config.show_progress, config.arpa_complain = False, kenlm.ARPALoadComplain.NONE
    try:
        with _unpacked(path) as plain:
            words = [word for word in read_vocabulary(plain, path) if word not in _MARKS]  # first, as it checks more
            return kenlm.Model(os.fsencode(plain), config), words  # KenLM encodes text as UTF-8, whatever the locale
    except (OSError, EOFError, RuntimeError, UnicodeDecodeError, zlib.error) as error:
        raise LanguageModelError(f"{path} must be an ARPA file or a KenLM binary: {error}") from error


def match_case(words: Sequence[str], labels: Sequence[str]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return two functions: one spells the model's words in the labels' case, the other a text in the model's case."""
    for to_labels, from_labels in _case_changes(labels):
        if all(_comes_back(word, to_labels, from_labels) for word in words):
            return to_labels, from_labels
    return str, str


def _case_changes(labels: Sequence[str]) -> Iterator[tuple[Callable[[str], str], Callable[[str], str]]]:
    lower, upper = choose_cases(labels)
    if not any(map(str.isupper, labels)):
        yield lower, upper
        if has_one_sigma(labels):
            yield lower, _end_words_in_final_sigma
    if not any(map(str.islower, labels)):
        yield upper, lower


def _comes_back(word: str, to_labels: Callable[[str], str], from_labels: Callable[[str], str]) -> bool:
    return from_labels(word) == from_labels(to_labels(word)) == word


def _end_words_in_final_sigma(text: str) -> str:
    return re.sub(rf"(?<=\w){SIGMA}(?!\w)", FINAL_SIGMA, text)


def _in_no_case(words: Sequence[str], labels: Sequence[str]) -> str:
    """Say which words keep a model from being used in the labels' case if most words fit it; else return ""."""
    for to_labels, from_labels in _case_changes(labels):
        others = [word for word in words if not _comes_back(word, to_labels, from_labels)]
        if 0 < 2 * len(others) < len(words) and set().union(*map(to_labels, words)) <= set(labels):
            found = ", ".join(f"{quote(word):.32}" for word in others[:20])
            return f"words must be in one case, and come back to it from the labels' case, but these do not: {found}"
    return ""


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Give the path of the file, or of an unpacked copy if it is a .gz, which KenLM's wheels cannot read."""
    with path.open("rb") as packed:
        is_packed = packed.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_packed else path.open("rb") as content:
        if content.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise LanguageModelError(f"{path} must begin without a byte order mark, but has one; save it as UTF-8")
    if not is_packed:
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".arpa") as plain, gzip.open(path) as content:
        size = path.stat().st_size
        while part := content.read(SMALL):
            plain.write(part)
            if plain.tell() > max(SMALL, MAX_TIMES_PACKED * size):
                raise LanguageModelError(
                    f"{path} must hold at most {MAX_TIMES_PACKED} times its size, which n-grams hardly reach, but "
                    f"holds more than that in {size:,} bytes; if it is meant to, unpack it by hand, `gzip -d`"
                )
        plain.flush()
        yield Path(plain.name)


def read_vocabulary(plain: Path, path: Path) -> Iterator[str]:
    """Yield the words of an ARPA file or a KenLM binary, marks such as <s> included. `path` is for messages.

    Raises:
        LanguageModelError: A count or a word is missing in its line of an ARPA file, a count is above the file's size
            in bytes, or a KenLM binary is cut short or was built without its words.
    """
    yield from _words_of_binary(plain, path) if is_kenlm_binary(plain) else _words_of_arpa(plain, path)


def is_kenlm_binary(path: Path) -> bool:
    """Return whether a file begins like a binary of KenLM: of any version, finished or not."""
    with path.open("rb") as file:
        return file.read(len(_BINARY)) == _BINARY


def _words_of_arpa(plain: Path, path: Path) -> Iterator[str]:
    size = plain.stat().st_size
    with plain.open(encoding="utf-8") as arpa:
        lines = iter(arpa)
        for line in lines:
            if line.startswith("\\1-grams:"):
                break
            # KenLM takes memory for a count unchecked: with a negative one it ended the process.
            count = _COUNT.match(line)
            if line.startswith("ngram ") and not (count and int(count[1]) <= size):
                raise LanguageModelError(
                    f"{path} must give a count of n-grams that it can hold, `ngram 1=200`, but gives {line!r:.200}"
                )
        for line in lines:
            if line.startswith("\\"):
                return
            word = line.partition("\t")[2].partition("\t")[0].strip(" \t\r\n")  # KenLM keeps other white space
            if word:
                yield word
            elif line.strip():
                raise LanguageModelError(
                    f"{path} must give a logarithm, tab and word in each line of `\\1-grams:`, not {line!r:.200}"
                )


def _words_of_binary(plain: Path, path: Path) -> Iterator[str]:
    # A KenLM binary ends with the words, each zero-terminated; <unk> is the first. Its header (FixedWidthParameters and
    # counts in lm/binary_format) says at byte 100 whether they are there, and at 108 how many, though a probing model
    # does not count an <unk> that its ARPA file had not.
    with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[: len(_VERSION_5)] != _VERSION_5:
            return  # KenLM says that it is of another version or unfinished
        if content[100:101] == b"\0":
            raise LanguageModelError(f"{path} must hold its words, but was built without: run build_binary without -v")
        num_words = int.from_bytes(content[108:116], "little")
        begin = content.rfind(b"<unk>\0")
        *terminated, rest = content[begin:].split(b"\0") if begin >= 0 else [b""]
    words = [word for word in terminated if word]  # a download that stopped may end in zeros
    if rest or len(words) < max(1, num_words):
        raise LanguageModelError(
            f"{path} must end with its {num_words:,} words, but is cut short, with {len(words):,}; copy it "
            "again, or make it anew"
        )
    yield from (word.decode("utf-8") for word in words)
