"""Perplexity of neural and n-gram language models on sentences, each read without context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carnelian_training.ctc.language_model import LN_10, finite, match_case, rate_words, read_ngrams
from carnelian_training.distributed import Process
from carnelian_training.language_models.tokens import END, UNKNOWN, Tokenizer
from carnelian_training.models.network import evaluating
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.precision import full_precision

MOST_TOKENS = 16_384
"""The most tokens that are scored at once, padding included."""


class Perplexity(NamedTuple):
    """The perplexity of a network on sentences."""

    per_token: float
    """The perplexity per token and sentence end."""
    per_word: float
    """The perplexity per word and sentence end, as for n-gram models. A network knows all words."""


@dataclass(frozen=True)
class WordScores:
    """The log-probability of each word and each sentence end of a text, in order."""

    log_probs: npt.NDArray[np.float64]
    """[words and ends] float64: the natural log-probability of each."""
    known: npt.NDArray[np.bool_]
    """[words and ends] bool: whether the model knows each. An n-gram model has one probability for all unknown words
    together, which is not the probability of a single one."""

    def perplexity(self, among: npt.NDArray[np.bool_] | None = None) -> float:
        """Return the perplexity per word and sentence end, over all or those in the mask `among` [words and ends]."""
        counted = self.log_probs if among is None else self.log_probs[among]
        return float(np.exp(-counted.mean())) if len(counted) else math.nan


def interpolate(scores: Sequence[WordScores]) -> WordScores:
    """Interpolate models with equal weights: average their probabilities word by word."""
    mean = np.logaddexp.reduce([score.log_probs for score in scores]) - math.log(len(scores))
    return WordScores(mean, np.logical_and.reduce([score.known for score in scores]))


def measure_perplexity(
    network: TransformerXl, sentences: Sequence[str], segment: int, process: Process | None = None
) -> Perplexity:
    """Measure a network's perplexity on sentences, each read without context.

    All processes must call this, with equal weights, and each scores its share. `segment` tokens are read at once; the
    result does not depend on it.
    """
    process = process or Process(next(network.parameters()).device)
    encoded = Tokenizer(network.tokenizer).encode(sentences)
    own = score_sentences(network, encoded[process.rank :: process.size], segment)
    log_prob = float(process.total(own.sum()))
    tokens, words = sum(map(len, encoded)), sum(len(sentence.split()) for sentence in sentences)
    per_token, per_word = (math.exp(-log_prob / max(1, count + len(sentences))) for count in (tokens, words))
    return Perplexity(per_token, per_word)


def score_words(network: TransformerXl, sentences: Sequence[str], segment: int) -> WordScores:
    """Score words by a network: the sum over a word's tokens, the first of which begins with a space."""
    tokenizer = Tokenizer(network.tokenizer)
    encoded = tokenizer.encode(sentences)
    words: list[float] = []
    known: list[bool] = []
    for tokens, log_probs in zip(encoded, score_tokens(network, encoded, segment), strict=True):
        for token, log_prob in zip([*tokens, END], log_probs.tolist(), strict=True):
            if token == END or tokenizer.begins_word(token):
                words.append(0.0)
                known.append(True)
            words[-1] += log_prob
            known[-1] &= token != UNKNOWN
    return WordScores(np.array(words), np.array(known))


def score_words_by_ngrams(path: Path, sentences: Sequence[str]) -> WordScores:
    """Score words by an n-gram model, an ARPA file or KenLM binary, whose case may differ from the sentences'.

    Raises:
        LanguageModelError: The model cannot be read, or gives a word a probability above 1 or NaN.
    """
    model, words = read_ngrams(path)
    _, spelled = match_case(words, sorted(set().union(*sentences)))
    *_, offset = rate_words(model, words, path)
    found = [score for sentence in sentences for score in model.full_scores(spelled(sentence))]
    log10 = np.array([finite(log_prob) + is_unknown * offset for log_prob, _, is_unknown in found])
    return WordScores(log10 * LN_10, np.array([not is_unknown for _, _, is_unknown in found], bool))


def score_sentences(network: TransformerXl, sentences: Sequence[Sequence[int]], segment: int) -> Tensor:
    """Compute the log-probability of each sentence and its end, [sentences] float64; see :func:`score_tokens`."""
    sums = [found.sum() for found in score_tokens(network, sentences, segment)]
    return torch.stack(sums or [torch.zeros((), dtype=torch.float64)])


@torch.inference_mode()
def score_tokens(network: TransformerXl, sentences: Sequence[Sequence[int]], segment: int) -> list[Tensor]:
    """Compute the log-probabilities of each sentence's tokens and of its end.

    Args:
        network: the language model.
        sentences: the tokens of each sentence, without the end.
        segment: number of tokens read at once; the network's memory connects the segments of a sentence.

    Returns:
        For each sentence, [tokens + 1] float64, on the CPU.
    """
    device = next(network.parameters()).device
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found: list[Tensor] = [torch.zeros(0)] * len(sentences)
    while order:
        longest = len(sentences[order[-1]]) + 1
        most = max(1, MOST_TOKENS // longest)
        order, batch = order[:-most], order[-most:]
        rows = [[END, *sentences[i], END] for i in batch]
        tokens = torch.tensor([row + [END] * (longest + 1 - len(row)) for row in rows])
        parts = []
        memory: Tensor | None = None
        for start in range(0, longest, segment):
            end = min(start + segment, longest)
            inputs, targets = tokens[:, start:end].to(device), tokens[:, start + 1 : end + 1].to(device)
            with evaluating(network), full_precision():
                log_probs, memory = network(inputs, targets, None, memory)
            parts.append(log_probs.cpu().double())
        for i, log_probs in zip(batch, torch.cat(parts, dim=1), strict=True):
            found[i] = log_probs[: len(sentences[i]) + 1]
    return found
