"""The raw file of a tuning: every setting that was tried, every run of it, and what was decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.percentile import percentile
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Traffic

SHIPPED = "as shipped"
CONFIRMATION = "confirmation"
"""The last step's name."""
UNCONFIRMED = "**Not finished.** The command was interrupted: there is no confirmation, and so no result."
LEAST_GAIN = 0.03
"""Of a change that is kept, in the median round: less is not worth a setting that somebody has to understand."""
LEAST_SHARE = 0.75
"""Of the rounds, in which a change that is kept must be a gain: a machine is not quiet."""

Objective = Literal["throughput", "latency"]
Settings = Mapping[str, Mapping[str, int | float]]
"""Stage -> setting -> value, where they differ from the shipped ones; counts stay integers in the raw file."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One tuning, once."""

    step: str
    tuning: str
    """Its name, see :func:`name_settings`."""
    round: int
    others_busy_cores: float
    wall_s: float
    latencies_s: list[float]
    """Empty if a request failed."""
    error: str | None
    server_cpu_s: float

    @property
    def clips_per_s(self) -> float:
        """Throughput."""
        return len(self.latencies_s) / self.wall_s

    def percentile_ms(self, percent: float) -> float:
        """Of the latencies."""
        return 1e3 * percentile(self.latencies_s, percent)


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """A raw file."""

    subject: Literal["tune"] = "tune"
    objective: Objective
    target_ms: float
    """Of the 95th percentile."""
    concurrency: int
    requests: int
    """In a run."""
    traffic: Traffic
    mismatches: list[int]
    """Clips whose transcript was not the same in every run; empty if all were."""
    tunings: dict[str, Settings]
    """By name; that of :data:`SHIPPED` is empty."""
    shipped: Settings
    """All settings of the stages as they are shipped."""
    kept: dict[str, str]
    """Step -> the name of the tuning that it left in place."""
    runs: Filled[Run]

    @property
    def winner(self) -> Settings | None:
        """What the confirmation left in place; empty where nothing beats the shipped settings; None before it."""
        if self.finished and set(self.kept.values()) <= {SHIPPED}:
            return {}  # there was nothing to confirm
        return self.tunings[self.kept[CONFIRMATION]] if CONFIRMATION in self.kept else None

    def say_unfinished(self) -> str:
        """Until the confirmation."""
        return "" if self.winner is not None else f"{UNCONFIRMED}\n\n"

    def runs_of(self, step: str, tuning: str) -> list[Run]:
        """Those of one tuning in one step, by round."""
        return sorted(
            (run for run in self.runs if run.step == step and run.tuning == tuning), key=lambda run: run.round
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A tuning beside another, round by round."""

    ratio: Ratio
    """The score of the one over the other's."""
    is_gain: bool
    """By :data:`LEAST_GAIN` and in :data:`LEAST_SHARE` of the rounds."""


def name_settings(settings: Settings) -> str:
    """A tuning's name: what differs from the shipped settings."""
    words = [
        f"{stage} {name.replace('_', ' ')} {value:g}"
        for stage, values in sorted(settings.items())
        for name, value in values.items()
    ]
    return ", ".join(words) or SHIPPED


def score(run: Run, objective: Objective, target_ms: float) -> float:
    """How good a run was; more is better.

    Latency: one over the median, in 1/s. Throughput: clips per second, reduced in proportion where the 95th percentile
    exceeds the target, so that a search that starts beyond it finds its way back.
    """
    if not run.latencies_s:
        return 0.0
    if objective == "latency":
        return 1e3 / run.percentile_ms(50)
    return run.clips_per_s * min(1.0, target_ms / run.percentile_ms(95))


def compare(candidate: Sequence[Run], current: Sequence[Run], objective: Objective, target_ms: float) -> Comparison:
    """Compare runs of the same rounds.

    Args:
        candidate: By round.
        current: By round, as many.
        objective: See :func:`score`.
        target_ms: Of the 95th percentile.
    """
    ours, theirs = ([score(run, objective, target_ms) for run in runs] for runs in (candidate, current))
    ratio = Ratio.of(ours, theirs)
    gains = sum(one > other for one, other in zip(ours, theirs, strict=True))
    return Comparison(ratio=ratio, is_gain=ratio.median >= 1 + LEAST_GAIN and gains >= LEAST_SHARE * len(ours))
