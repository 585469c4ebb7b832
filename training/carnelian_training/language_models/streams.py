"""Text for a model with a memory: equal streams side by side, of which each step reads the next segment.

In: sentences as tokens. Out: :class:`Segment`. An epoch depends on the seed and its number alone, so a run can stop
after any step and go on exactly there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from carnelian_training.language_models.config import TextConfig
from carnelian_training.language_models.tokens import END


@dataclass(frozen=True)
class Stretch:
    """What one step reads of one stream."""

    stream: int
    first: int
    """Its first token in the stream."""
    size: int

    @property
    def title(self) -> str:
        """How the log calls it."""
        return f"tokens {self.first} to {self.first + self.size - 1} of stream {self.stream}"


@dataclass(frozen=True)
class Segment:
    """What one step reads of some streams."""

    items: Sequence[Stretch]
    tokens: Tensor
    """[streams, time] int64, as are the next two."""
    targets: Tensor
    """The token after each."""
    reach: Tensor
    """How many tokens before itself each may see: all, or those of its sentence."""
    rows: slice
    """These streams among those of the process."""
    skipped: Sequence[object] = ()


class Streams:
    """A text as streams.

    Args:
        sentences: their tokens, in the order of the text, without ends.
        config: says how many streams, and how long a segment is.

    Raises:
        ValueError: The text is shorter than one step.
    """

    def __init__(self, sentences: Sequence[Sequence[int]], config: TextConfig) -> None:
        self.config = config
        flat = np.fromiter((token for sentence in sentences for token in (END, *sentence)), np.int32)
        self.tokens = np.append(flat, np.int32(END))
        self.sentence = (flat == END).cumsum() - 1  # of each token
        positions = np.arange(len(flat))
        self.since = positions - np.maximum.accumulate(np.where(flat == END, positions, 0))
        self.steps = len(flat) // (config.streams * config.segment)
        """In an epoch; what is left over comes in other epochs, which begin elsewhere."""
        if not self.steps:
            raise ValueError(
                f"the text must hold a step of {config.streams} `text.streams` by {config.segment} tokens of "
                f"`text.segment`, but holds {len(flat)} tokens"
            )

    def segments(
        self, seed: int, epoch: int, start: int, rank: int = 0, size: int = 1
    ) -> Iterator[tuple[list[Stretch], list[Segment]]]:
        """Read an epoch from step `start` on: for each step, all it reads, and the parts of process `rank`.

        All processes, `size` of them, have equally many parts.
        """
        segment, streams = self.config.segment, self.config.streams
        own = range(rank, streams, size)
        most = min(self.config.device_streams or streams, len(own))
        parts = [slice(first, first + most) for first in range(0, len(own), most)]
        laid_out = self._lay_out(seed, epoch)
        for step in range(start, self.steps):
            span = slice(step * segment, (step + 1) * segment)
            items = [Stretch(stream, span.start, segment) for stream in range(streams)]
            mine = items[rank::size]
            tokens, targets, reach = (values[rank::size, span] for values in laid_out)
            yield items, [Segment(mine[rows], tokens[rows], targets[rows], reach[rows], rows) for rows in parts]

    def _lay_out(self, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, targets and reach, [streams, time] int64 each, of an epoch, which begins anywhere in the text."""
        rng = np.random.default_rng([seed % 2**64, epoch])  # NumPy takes no negative one
        turn = int(rng.integers(len(self.since)))
        in_context = rng.random(self.sentence[-1] + 1) < self.config.context_share
        # Longer than any memory; the model sees to it that no token sees more than there is.
        reach = np.where(in_context[self.sentence], len(self.since), self.since)
        length = self.steps * self.config.segment

        def laid_out(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
            turned = np.roll(values, -turn)[: self.config.streams * length]
            return torch.from_numpy(turned.astype(np.int64).reshape(self.config.streams, length))

        return laid_out(self.tokens[:-1]), laid_out(self.tokens[1:]), laid_out(reach)
