"""How well decoders hear rare words that are hot words, and what that costs the other words."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jiwer
from carnelian_training import ctc
from carnelian_training.ctc.language_model import match_case, read_ngrams
from carnelian_training.evaluation.evaluate import LogProbs

RARE_LETTERS, RARE_PROBABILITY = 5, 2e-6
"""A rare word has at least this many letters and at most this unigram probability, or is unknown."""


@dataclasses.dataclass(frozen=True)
class HotwordRow:
    """The accuracy of one decoder if all rare words are hot words for every clip."""

    decoder: str
    boost: float
    """Boost of the hot words; 0 means without hot words."""
    precision: float
    recall: float
    f1: float
    wer_of_others: float
    """Word error rate after rare words are removed from references and transcripts."""


def rare_words(references: Sequence[str], language_model: Path) -> list[str]:
    """Find the words of the references that are rare by the language model alone, without using any decoder."""
    import kenlm

    model, known = read_ngrams(language_model)
    _, spelled = match_case(known, sorted(set().union(*references)))
    nowhere, after = kenlm.State(), kenlm.State()
    model.NullContextWrite(nowhere)
    words = sorted({word for text in references for word in text.split() if len(word) >= RARE_LETTERS})
    return [
        word
        for word in words
        if spelled(word) not in model or 10 ** model.BaseScore(nowhere, spelled(word), after) <= RARE_PROBABILITY
    ]


def measure_hotwords(
    decoder: ctc.Decoder,
    usual: ctc.Options,
    log_probs: Sequence[LogProbs],
    references: Sequence[str],
    rare: Sequence[str],
    boosts: Sequence[float],
) -> list[HotwordRow]:
    """Decode every clip with all rare words as hot words, whether or not the clip has them, at every boost."""
    rows = []
    for name in ("beam", "ngram"):
        for boost in (0.0, *boosts):
            parameters = {"decoder": name}
            if boost:
                parameters |= {"hotwords": json.dumps(rare), "hotword_boost": str(boost)}
            options = decoder.read_options(parameters, usual)
            heard = [decoder.decode([row], [options])[0].text for row in log_probs]
            rows.append(rate_hotwords(name, boost, references, heard, rare))
    return rows


def rate_hotwords(
    name: str, boost: float, references: Sequence[str], heard: Sequence[str], rare: Sequence[str]
) -> HotwordRow:
    """Count rare words clip by clip, and compute their precision, recall and F1, and the WER of the other words."""
    hits = said = found = 0
    known = set(rare)
    for reference, transcript in zip(references, heard, strict=True):
        want, have = (Counter(word for word in text.split() if word in known) for text in (reference, transcript))
        hits, said, found = hits + (want & have).total(), said + want.total(), found + have.total()
    others = jiwer.wer([_without(text, known) for text in references], [_without(text, known) for text in heard])
    precision, recall = hits / max(found, 1), hits / max(said, 1)
    return HotwordRow(name, boost, precision, recall, 2 * hits / max(said + found, 1), others)


def _without(text: str, words: set[str]) -> str:
    return " ".join(word for word in text.split() if word not in words)
