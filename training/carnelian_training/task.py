"""What the loop asks of what it trains: recognisers, wav2vec 2.0 in pre-training and language models answer alike."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from carnelian_training.report import Report
from carnelian_training.state import State


class Item(Protocol):
    """What a step is made of: a clip, or a stretch of text."""

    @property
    def title(self) -> str:
        """How the log calls it."""


@dataclass(frozen=True)
class Share:
    """What one process does of one step of the optimiser."""

    items: Sequence[Any]
    """Those of the whole step, over all processes."""
    batches: Iterator[Any]
    """The parts of this process; some may be empty. Each knows its `items` and those that were left out, `skipped`."""
    parts: int
    """How many batches: as many as in every other process."""


class Objective(Protocol):
    """The loss of one step, which the loop divides by the weight of all parts and processes."""

    def planned(self, items: Sequence[Any]) -> float:
        """About the weight of a step; the loop corrects it by what :meth:`losses` found."""

    def batches(self, batches: Iterable[Any], parts: int) -> Iterable[Any]:
        """The parts of this process, in the order in which :meth:`losses` will see them."""

    def losses(self, network: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of each item, [items] float32, and the weight of all."""

    def measured(self) -> Mapping[str, float]:
        """What else a step tells, over all parts and processes; every process has to call it."""


class Finding(NamedTuple):
    """What an evaluation found."""

    record: dict[str, Any]
    error: float
    """The best weights are those with the smallest."""


class Task(Protocol):
    """Where a run's steps come from, and how it is examined."""

    def prepare(self, state: State) -> None:
        """Check and read what the steps need, once `state` is where the run starts; every process has to call it."""

    def shares(self, state: State) -> Iterator[Share]:
        """What this process has to do, step after step without end, from where `state` is, which is kept up to date."""

    def amounts(self, items: Sequence[Any]) -> Mapping[str, float]:
        """How much a step holds, by unit; the log has it per second."""

    def evaluate(self, state: State, report: Report) -> Finding | None:
        """Examine and report `state.best_model`; None if there is nothing to do it with."""
