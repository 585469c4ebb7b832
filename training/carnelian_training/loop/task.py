"""The interface between the training loop and its kinds of model: recogniser, wav2vec 2.0 pre-training, language model.

A :class:`Task` yields the data of a run's steps and evaluates; an :class:`Objective` computes the loss of one step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from carnelian_training.loop.report import Report
from carnelian_training.loop.state import State


class Item(Protocol):
    """One training example of a step: a clip, or a stretch of text."""

    @property
    def title(self) -> str:
        """The name of the item in the log."""


class Objective(ABC):
    """The loss of one step, which the loop divides by the weight of all parts and processes."""

    @abstractmethod
    def planned(self, items: Sequence[Any]) -> float:
        """Return an estimate of a step's weight; the loop later corrects it by the sum of weights of :meth:`losses`."""

    def batches(self, batches: Iterable[Any], parts: int) -> Iterable[Any]:
        """Return the batches of this process, in the order in which :meth:`losses` will see them."""
        return batches

    @abstractmethod
    def losses(self, network: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the loss of each item, [items] float32, and the weight of all items together."""

    def measured(self) -> Mapping[str, float]:
        """Return figures to log beside the loss, over all parts and processes; every process has to call it."""
        return {}


@dataclass(frozen=True)
class Share:
    """The part of one optimiser step that one process takes."""

    items: Sequence[Any]
    """The items of the whole step, over all processes."""
    batches: Iterator[Any]
    """The batches of this process; some may be empty. Each has its `items`, and in `skipped` those left out."""
    parts: int
    """The number of batches, the same in every process."""
    objective: Objective
    """The objective of the step."""


class Finding(NamedTuple):
    """The result of an evaluation."""

    record: dict[str, Any]
    """The figures, as `metrics.jsonl` has them."""
    error: float
    """The error to compare evaluations by; the weights with the smallest are kept as the best."""


class Task(Protocol):
    """The source of a run's steps, and the evaluation of its model."""

    def prepare(self, state: State) -> None:
        """Check and read what the steps need, once `state` is where the run starts; every process has to call it."""

    def shares(self, state: State) -> Iterator[Share]:
        """Yield the share of this process in each step, without end, from the place of `state`, kept up to date."""

    def amounts(self, items: Sequence[Any]) -> Mapping[str, float]:
        """Return how much data a step holds, by unit (for example `audio_s`); the log shows each per second."""

    def evaluate(self, state: State, report: Report) -> Finding | None:
        """Evaluate `state.best_model` and report the result; None if there is no data to evaluate on."""
