"""How well language models of any kind foretell sentences, each as if nothing had been said before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kenlm
import torch
from torch import Tensor

from carnelian_training.distributed import Process
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.tokens import END, Tokenizer

MOST_TOKENS = 16_384
"""Rated at once."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well sentences are foretold, their ends included."""

    log_prob: float
    """Natural logarithm, of all sentences together."""
    sentences: int
    words: int
    """Without ends, as are the tokens."""
    tokens: int | None = None
    """None of an n-gram model, whose tokens are the words."""
    unknown: int = 0
    """Words that the model does not know; it has one probability for all of them together."""

    @property
    def per_token(self) -> float:
        """Of tokens and ends."""
        return self._per(self.words if self.tokens is None else self.tokens)

    @property
    def per_word(self) -> float:
        """Of words and ends, unknown words included."""
        return self._per(self.words)

    def _per(self, units: int) -> float:
        return math.exp(-self.log_prob / max(1, units + self.sentences))


def rate_network(
    network: TransformerXl, sentences: Sequence[str], segment: int, process: Process | None = None
) -> Perplexity:
    """Rate sentences by a network.

    Args:
        network: with its tokenizer and with equal weights in every process.
        sentences: in the labels' characters.
        segment: tokens that are read at once; the result does not depend on it.
        process: this one among several, all of which must call; each rates its share.
    """
    process = process or Process(next(network.parameters()).device)
    encoded = Tokenizer(network.tokenizer).encode(sentences)
    log_prob = rate(network, encoded[process.rank :: process.size], segment).sum()
    words, tokens = sum(len(sentence.split()) for sentence in sentences), sum(map(len, encoded))
    return Perplexity(log_prob=float(process.total(log_prob)), sentences=len(sentences), words=words, tokens=tokens)


def rate_ngram(path: Path, sentences: Sequence[str]) -> Perplexity:
    """Rate sentences by an n-gram model, an ARPA file or a KenLM binary.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        model = kenlm.Model(str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} must be an ARPA file or a KenLM binary, but cannot be read: {error}") from error
    words = [sentence.split() for sentence in sentences]
    log10 = sum(model.score(sentence) for sentence in sentences)
    unknown = sum(word not in model for found in words for word in found)
    return Perplexity(
        log_prob=log10 * math.log(10), sentences=len(sentences), words=sum(map(len, words)), unknown=unknown
    )


@torch.inference_mode()
def rate(network: TransformerXl, sentences: Sequence[Sequence[int]], segment: int) -> Tensor:
    """The log-probability of each sentence and its end.

    Args:
        network: is set to evaluation mode.
        sentences: tokens without ends.
        segment: tokens that are read at once; the memory carries the sentence on.

    Returns:
        [sentences] float64, on the CPU.
    """
    network.eval()
    device = next(network.parameters()).device
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found = torch.zeros(len(sentences), dtype=torch.float64)
    while order:
        longest = len(sentences[order[-1]]) + 1
        most = max(1, MOST_TOKENS // longest)
        order, batch = order[:-most], order[-most:]
        rows = [[END, *sentences[i], END] for i in batch]
        tokens = torch.tensor([row + [END] * (longest + 1 - len(row)) for row in rows])
        steps = torch.tensor([len(row) - 1 for row in rows])[:, None]
        memory: Tensor | None = None
        for start in range(0, longest, segment):
            end = min(start + segment, longest)
            inputs, targets = tokens[:, start:end].to(device), tokens[:, start + 1 : end + 1].to(device)
            log_probs, memory = network(inputs, targets, None, memory)
            inside = torch.arange(start, end) < steps
            found[batch] += torch.where(inside, log_probs.cpu().double(), 0.0).sum(1)
    return found
