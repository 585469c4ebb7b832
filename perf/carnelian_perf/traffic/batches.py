"""The acoustic stage's batches in runs of requests, and how much of them is padding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from carnelian_perf.served_run import ServedRun


@dataclass(frozen=True, kw_only=True)
class BatchedRun(ServedRun):
    """A run of requests of which the acoustic stage's batches are counted, too."""

    audio_s: float
    acoustic_batches: dict[int, int]
    """Batch size -> number of executions of the acoustic stage, by Triton's statistics."""
    real_frames: int
    """Number of feature frames of the clips."""
    processed_frames: float
    """Number of frames that the acoustic network computed, padding included."""


@dataclass(frozen=True)
class Batches:
    """The batches of several runs together; zeros if there are none."""

    sizes: dict[int, int]
    """Batch size -> number of executions, ascending."""
    mean_size: float
    """Clips in a batch, on average."""
    percentages: list[float]
    """Percentage of the clips that were in batches of each size."""
    padding_ratio: float
    """Frames that the acoustic network computed for each frame of the clips."""

    @classmethod
    def of(cls, runs: Sequence[BatchedRun]) -> "Batches":
        """Add up the batches and frames of runs."""
        sizes = dict(sorted(sum((Counter(run.acoustic_batches) for run in runs), Counter[int]()).items()))
        clips, real = sum(size * count for size, count in sizes.items()), sum(run.real_frames for run in runs)
        return cls(
            sizes,
            mean_size=clips / max(sum(sizes.values()), 1),
            percentages=[100 * size * count / clips for size, count in sizes.items()],
            padding_ratio=sum(run.processed_frames for run in runs) / max(real, 1),
        )
