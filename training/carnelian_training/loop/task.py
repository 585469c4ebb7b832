"""The interface between the training loop and what it trains: a recogniser, wav2vec 2.0, a language model.

A :class:`Task` deals out the steps of a run and evaluates; an :class:`Objective` is the loss of one step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from carnelian_training.loop.report import Report
from carnelian_training.loop.state import State


class Item(Protocol):
    """What a step is made of: a clip, or a stretch of text."""

    @property
    def title(self) -> str:
        """How the log calls it."""


@dataclass(frozen=True)
class Share:
    """The part of one optimiser step that one process takes."""

    items: Sequence[Any]
    """Those of the whole step, over all processes."""
    batches: Iterator[Any]
    """The parts of this process; some may be empty. Each knows its `items` and those that were left out, `skipped`."""
    parts: int
    """How many batches: as many as in every other process."""


class Objective(Protocol):
    """The loss of one step, which the loop divides by the weight of all parts and processes."""

    def planned(self, items: Sequence[Any]) -> float:
        """An estimate of the weight of a step; the loop replaces it by the sum of what :meth:`losses` returned."""

    def batches(self, batches: Iterable[Any], parts: int) -> Iterable[Any]:
        """The parts of this process, in the order in which :meth:`losses` will see them."""

    def losses(self, network: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of each item, [items] float32, and the weight of all."""

    def measured(self) -> Mapping[str, float]:
        """Further figures to log, over all parts and processes; every process has to call it."""


class Finding(NamedTuple):
    """The result of an evaluation."""

    record: dict[str, Any]
    error: float
    """What training minimises: the weights with the smallest error are kept as the best."""


class Task(Protocol):
    """Where a run's steps come from, and how its model is evaluated."""

    def prepare(self, state: State) -> None:
        """Check and read what the steps need, once `state` is where the run starts; every process has to call it."""

    def shares(self, state: State) -> Iterator[Share]:
        """Yield the share of this process in each step, without end, from where `state` is; keep `state` up to date."""

    def amounts(self, items: Sequence[Any]) -> Mapping[str, float]:
        """How much data a step holds, by unit; the log shows each per second."""

    def evaluate(self, state: State, report: Report) -> Finding | None:
        """Evaluate `state.best_model` and report the result; None if there is no data to evaluate on."""
