"""A word n-gram language model: ARPA (also .gz) or KenLM binary, read and asked through KenLM.

KenLM answers; what is kept here is its vocabulary as a prefix tree, and the answers that were given.
"""

import gzip
import logging
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kenlm
import numpy as np

from .prefix_tree import build_tree, encode
from .spelling import choose_cases

logger = logging.getLogger(__name__)

LN_10 = math.log(10)
NEVER = -99.0
"""Decimal logarithm that SRILM writes for 0; KenLM puts -100 in place of an <unk> that a file does not have."""
MAX_ANSWERS = 1_000_000
"""Kept at a time, with the contexts they belong to; about 200 MB."""
_MARKS = ("<s>", "</s>", "<unk>", "<UNK>")


class LanguageModelError(ValueError):
    """The language model cannot be used with this recogniser; the message says why."""


class LanguageModel:
    """Costs of words after words, as natural log-probabilities, for words spelled in the recogniser's labels.

    Attributes:
        tree: [states, labels] int32; the vocabulary, see :func:`build_tree`. The last state is the beginning of no
            word.
        word: [states] int32; the word that ends in a state, or -1.
        best: [states] float64; log-probability of the likeliest unigram that begins so.
    """

    def __init__(self, path: Path, labels: Sequence[str]) -> None:
        """Load a model.

        Args:
            path: ARPA, plain or .gz, or KenLM binary. One in capitals serves labels in small letters, and the reverse.
            labels: one character each.

        Raises:
            LanguageModelError: It is none, has words that the labels cannot spell, or there is no label between words.
        """
        if " " not in labels:
            raise LanguageModelError(
                f"{path} is of words, so one label must be the space, but the labels are {''.join(labels)!r:.200}"
            )
        self._model, self._words = read_ngrams(path)
        to_labels, self._from_labels = match_case(self._words, labels)
        try:
            codes = encode([to_labels(word) for word in self._words], labels)
        except ValueError as error:
            raise LanguageModelError(f"{path} does not fit the recogniser: {error}") from error
        self.tree, parents, ends = build_tree(codes, len(labels))
        self.word = np.full(len(self.tree), -1, np.int32)
        self.word[ends] = np.arange(len(ends))
        nowhere, after = kenlm.State(), kenlm.State()
        self._model.NullContextWrite(nowhere)
        self.best = np.full(len(self.tree), -np.inf)
        scores = [self._model.BaseScore(nowhere, word, after) for word in self._words]
        self.best[ends] = np.multiply(scores, LN_10)
        for state in range(len(parents) - 1, 0, -1):  # deepest first
            self.best[parents[state]] = max(self.best[parents[state]], self.best[state])
        unknown = self._model.BaseScore(nowhere, "<unk>", after)
        self._unknown_offset = 0.0  # natural logarithm
        if unknown <= NEVER:
            # Else no hot word that the model does not know could be heard, whatever its boost.
            least = min((score for score in scores if score > NEVER), default=unknown)
            self._unknown_offset = (least - unknown) * LN_10
            logger.warning("%s has no <unk>: unknown words get the probability of its least likely one", path)
        self.best[-1] = unknown * LN_10 + self._unknown_offset
        self._forget()

    def _forget(self) -> None:
        start = kenlm.State()
        self._model.BeginSentenceWrite(start)
        self._states = [start]
        self._numbers = {start: 0}
        self._answers: dict[tuple[int, int], tuple[float, int]] = {}

    def start(self) -> int:
        """The context at the start of a sentence; contexts of earlier sentences end here."""
        if len(self._answers) > MAX_ANSWERS:
            self._forget()
        return 0

    def score(self, context: int, word: int) -> tuple[float, int]:
        """Natural log-probability of a word, -1 being an unknown one, and the context after it."""
        answer = self._answers.get((context, word))
        if answer is None:
            after = kenlm.State()
            spelled, offset = (self._words[word], 0.0) if word >= 0 else ("<unk>", self._unknown_offset)
            log_prob = self._model.BaseScore(self._states[context], spelled, after) * LN_10 + offset
            number = self._numbers.setdefault(after, len(self._states))
            if number == len(self._states):
                self._states.append(after)
            answer = self._answers[context, word] = (log_prob, number)
        return answer

    def rate(self, text: str) -> tuple[float, int]:
        """Natural log-probability of a whole text, its end included, and how many of its words are unknown."""
        scores = list(self._model.full_scores(self._from_labels(text)))
        unknown = sum(is_unknown for _, _, is_unknown in scores)
        return sum(log_prob for log_prob, _, _ in scores) * LN_10 + unknown * self._unknown_offset, unknown

    def end(self, context: int) -> float:
        """Natural log-probability of the sentence's end."""
        return float(self._model.BaseScore(self._states[context], "</s>", kenlm.State())) * LN_10


def read_ngrams(path: Path) -> tuple[kenlm.Model, list[str]]:
    """KenLM's own model, and its words without marks such as <s>.

    Args:
        path: ARPA, plain or .gz, or KenLM binary.

    Raises:
        LanguageModelError: It is none, or a binary that was built without its words.
    """
    config = kenlm.Config()
    config.show_progress, config.arpa_complain = False, kenlm.ARPALoadComplain.NONE
    try:
        with _unpacked(path) as plain:
            model = kenlm.Model(os.fsencode(plain), config)  # it encodes text as UTF-8, whatever the locale
            return model, [word for word in read_vocabulary(plain) if word not in _MARKS]
    except (OSError, EOFError, RuntimeError, UnicodeDecodeError, zlib.error) as error:
        raise LanguageModelError(f"{path} must be an ARPA file or a KenLM binary: {error}") from error


def match_case(words: Sequence[str], labels: Sequence[str]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """What spells a word of the model in the labels, and a text in the labels as the model does."""
    lower, upper = choose_cases(labels)
    if not any(map(str.isupper, labels)) and all(upper(word) == upper(lower(word)) == word for word in words):
        return lower, upper
    if not any(map(str.islower, labels)) and all(lower(upper(word)) == word for word in words):
        return upper, lower
    return str, str


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """The file, or what a .gz holds: KenLM's wheels cannot read those."""
    with path.open("rb") as packed:
        if packed.read(2) != b"\x1f\x8b":
            yield path
            return
    with tempfile.NamedTemporaryFile(suffix=".arpa") as plain, gzip.open(path) as content:
        shutil.copyfileobj(content, plain)
        plain.flush()
        yield Path(plain.name)


def read_vocabulary(path: Path) -> Iterator[str]:
    """The words of an ARPA file or a KenLM binary, marks such as <s> included.

    Raises:
        LanguageModelError: A KenLM binary was built without its words.
    """
    with path.open("rb") as file:
        magic = file.read(16)
    if not magic.startswith(b"mmap lm http"):
        with path.open(encoding="utf-8") as arpa:
            lines = iter(arpa)
            for line in lines:
                if line.startswith("\\1-grams:"):
                    break
            for line in lines:
                if line.startswith("\\"):
                    return
                if line.strip():
                    yield line.split("\t")[1].strip()
        return
    # KenLM's binary ends with the words, zero-terminated, <unk> being the first.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = content.rfind(b"<unk>\0")
        if begin < 0:
            raise LanguageModelError(f"{path} must hold its words, but was built without: run build_binary without -v")
        words = content[begin:].split(b"\0")
    yield from (word.decode("utf-8") for word in words if word)
