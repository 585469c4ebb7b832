"""The training task of a language model, predicting each token from those before it, and its loss."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.language_models.perplexity import measure_perplexity
from carnelian_training.language_models.sentences import divide
from carnelian_training.language_models.streams import Segment, Streams, Stretch
from carnelian_training.language_models.tokens import Tokenizer, train_tokenizer
from carnelian_training.loop.report import Report
from carnelian_training.loop.state import State
from carnelian_training.loop.task import Finding, Objective, Share
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.precision import autocast
from carnelian_training.synthesis.texts import choose_sources

logger = logging.getLogger(__name__)


class LanguageModelling:
    """The task of training on text; implements :class:`carnelian_training.loop.task.Task`."""

    streams: Streams
    held_out: list[str]

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config

    def prepare(self, state: State) -> None:
        """Read the text and tokenize it, with the checkpoint's tokenizer if there is one.

        Raises:
            ValueError: A text is missing or too small, the checkpoint's tokens are for other labels, or the streams
                cannot be divided among the processes.
        """
        text, process = self.config.text, state.process
        if text.streams % process.size:
            raise ValueError(
                f"`text.streams` must be a multiple of the {process.size} processes, but is {text.streams}"
            )
        assert isinstance(state.model, TransformerXl)
        if state.model.tokenizer:
            known = Tokenizer(state.model.tokenizer).characters
            if wrong := known ^ (set(text.alphabet) - {" "}):
                raise ValueError(
                    "`text.labels` must be the characters of the tokens, which come with the checkpoint, but these are "
                    f"in one of the two alone: {''.join(sorted(wrong))!r}; take a checkpoint of the same labels"
                )
        sentences = divide(choose_sources(text.sources), text.exclude, text.labels)
        self.held_out = sentences.held_out
        if process.leads:
            digest = hashlib.sha256("\n".join(self.held_out).encode()).hexdigest()
            learnt = "the texts are others than before, so the model may be rated by sentences that it has learnt"
            state.rate_by(digest, learnt)
        if not state.model.tokenizer:
            model = train_tokenizer(sentences.used, text.tokens, text.alphabet).model if process.leads else b""
            state.model.tokenizer = process.broadcast(model)
            state.restart_average()
        encoded = Tokenizer(state.model.tokenizer).encode(sentences.used)
        self.streams = Streams(encoded, text)
        logger.info(
            "%d sentences, %d words, %d tokens, %d steps an epoch; left out: %d that cannot be written in the labels, "
            "%d of `text.exclude`, %d to rate by",
            len(sentences.used),
            sum(sentence.count(" ") + 1 for sentence in sentences.used),
            sum(map(len, encoded)),
            self.streams.steps,
            sentences.refused,
            sentences.excluded,
            len(sentences.held_out),
        )

    def shares(self, state: State) -> Iterator[Share]:
        """Yield the share of this process in each step; see :meth:`carnelian_training.loop.task.Task.shares`."""
        rank, size = state.process.rank, state.process.size
        while True:
            for items, parts in self.streams.segments(self.config.loop.seed, state.epoch, state.batch, rank, size):
                state.batch += 1
                yield Share(items, iter(parts), len(parts), NextTokenObjective(state, self.config))
            state.epoch, state.batch = state.epoch + 1, 0
            state.memory = None  # the streams of the next epoch begin elsewhere

    def amounts(self, items: Sequence[Stretch]) -> Mapping[str, float]:
        """Return the number of tokens of a step."""
        return {"tokens": sum(item.size for item in items)}

    def evaluate(self, state: State, report: Report) -> Finding | None:
        """Measure the perplexity on the held-out sentences; None if there are none."""
        assert isinstance(state.best_model, TransformerXl)
        if not self.held_out:
            return None
        found = measure_perplexity(state.best_model, self.held_out, self.config.text.segment, state.process)
        rounded = {"dev_perplexity": round(found.per_token, 3), "dev_word_perplexity": round(found.per_word, 3)}
        return Finding(report.record(state.step, rounded), found.per_word)


class NextTokenObjective(Objective):
    """The cross-entropy of one step, given the network's memory of the steps before.

    All parts of the step read the state's memory; then it is replaced.
    """

    def __init__(self, state: State, config: LanguageModelConfig) -> None:
        self.state, self.config = state, config
        self.remembered: list[Tensor] = []

    def planned(self, items: Sequence[Stretch]) -> float:
        """Return the number of tokens of a step."""
        return sum(item.size for item in items)

    def batches(self, batches: Iterable[Segment], parts: int) -> Iterable[Segment]:
        """Yield the parts of this process; after the last one, replace the state's memory by that of this step."""
        yield from batches
        self.state.memory = torch.cat(self.remembered, dim=1)

    def losses(self, network: nn.Module, batch: Segment) -> tuple[Tensor, int]:
        """Return the loss of each stream, [streams] float32, and the number of tokens of all streams."""
        device = self.state.process.device
        memory = None if self.state.memory is None else self.state.memory[:, batch.rows]
        with autocast(device, self.config.loop.precision):
            inputs = (tensor.to(device) for tensor in (batch.tokens, batch.targets, batch.reach))
            log_probs, memory = network(*inputs, memory)
        self.remembered.append(memory)
        return -log_probs.sum(1), batch.tokens.numel()
