"""The results of a tuning: the raw file, with every setting that was tried and what was decided, and its page."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.pages import page, say_busy, table
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Traffic
from carnelian_perf.served_run import ServedRun

SHIPPED = "as shipped"
CONFIRMATION = "confirmation"
"""Name of the last step, in which the winner takes turns with the shipped settings once more."""
UNCONFIRMED = "**Not finished.** The command was interrupted: there is no confirmation, and so no result."
LEAST_GAIN = 0.03
"""The least gain of a change that is kept, in the median round: less is not worth a setting that people must know."""
LEAST_SHARE = 0.75
"""The least share of rounds in which a change that is kept must be a gain, because a machine is not quiet."""

Objective = Literal["throughput", "latency"]
Settings = Mapping[str, Mapping[str, int | float]]
"""Stage -> setting -> value, where they differ from the shipped ones; counts stay integers in the raw file."""


@dataclass(frozen=True, kw_only=True)
class Run(ServedRun):
    """One run of one tuning, in one round of a step; it has no latencies if a request failed."""

    step: str
    tuning: str
    """Name of the tuning, see :func:`name_settings`."""
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf tune`."""

    subject: Literal["tune"] = "tune"
    objective: Objective
    target_ms: float
    """Limit for the 95th percentile of latency, in milliseconds."""
    concurrency: int
    requests: int
    """Number of requests in a run."""
    traffic: Traffic
    mismatches: list[int]
    """Indices of the clips whose transcript was not the same in every run."""
    tunings: dict[str, Settings]
    """Name of a tuning -> its settings; those of :data:`SHIPPED` are empty."""
    shipped: Settings
    """All settings of the stages as they are shipped."""
    kept: dict[str, str]
    """Step -> the name of the tuning that it left in place."""
    runs: Filled[Run]

    @property
    def winner(self) -> Settings | None:
        """The settings that the confirmation kept; empty if nothing beats the shipped ones; None before it."""
        if self.finished and set(self.kept.values()) <= {SHIPPED}:
            return {}  # there was nothing to confirm
        return self.tunings[self.kept[CONFIRMATION]] if CONFIRMATION in self.kept else None

    def say_unfinished(self) -> str:
        """Return the warning below a page's title until there is a result, then an empty text."""
        return "" if self.winner is not None else f"{UNCONFIRMED}\n\n"

    def runs_of(self, step: str, tuning: str) -> list[Run]:
        """Return the runs of one tuning in one step, in the order of the rounds."""
        return sorted(
            (run for run in self.runs if run.step == step and run.tuning == tuning), key=lambda run: run.round
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A tuning compared with another, round by round."""

    ratio: Ratio
    """The score of the tuning divided by that of the other."""
    is_gain: bool
    """Whether it gains :data:`LEAST_GAIN` in the median round, and gains in :data:`LEAST_SHARE` of the rounds."""


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
        candidate: Runs of the candidate, one for each round, in order.
        current: Runs of the tuning that it is compared with, of the same rounds.
        objective: What makes a run good, see :func:`score`.
        target_ms: Limit for the 95th percentile of latency, in milliseconds.
    """
    ours, theirs = ([score(run, objective, target_ms) for run in runs] for runs in (candidate, current))
    ratio = Ratio.of(ours, theirs)
    gains = sum(one > other for one, other in zip(ours, theirs, strict=True))
    return Comparison(ratio=ratio, is_gain=ratio.median >= 1 + LEAST_GAIN and gains >= LEAST_SHARE * len(ours))


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each tuning of each step."""
    head = ("step", "tuning", "clips/s", "p50 ms", "p95 ms", "CPU ms/clip", "over the shipped", "worst", "best", "")
    notes = [
        f"Objective: {_say_objective(measurement)}; {measurement.requests} requests in a run, "
        f"{measurement.concurrency} at a time.",
        "Over the shipped: how many times as good as the shipped settings in the same round, by the objective; the "
        f"median, worst and best of the rounds. A change is kept if it gains {LEAST_GAIN:.0%} on the settings so far "
        f"in the median round, and gains in at least {LEAST_SHARE:.0%} of the rounds.",
        f"Shipped: {name_settings(measurement.shipped)}. Threads 0: all cores in ONNX Runtime, one in the features' "
        "graph.",
        f"Clips: {measurement.traffic}.",
        f"Transcripts: {'NOT ' if measurement.mismatches else ''}equal in all runs.",
        f"Machine: {measurement.say_machine()}. Other processes "
        f"{say_busy(run.others_busy_cores for run in measurement.runs)} before the runs.",
        *measurement.say_sources(raw_name),
    ]
    rows = [row for step in measurement.kept for row in _rows(measurement, step)]
    winner = measurement.winner
    verdict = [] if winner is None else [f"**Result: {name_settings(winner)}.**\n"]
    return page(f"{measurement.model}: tuned", measurement, [*verdict, table(head, rows)], notes)


def _say_objective(measurement: Measurement) -> str:
    if measurement.objective == "latency":
        return "the median latency"
    return f"clips per second, reduced in proportion where the 95th percentile exceeds {measurement.target_ms:g} ms"


def _rows(measurement: Measurement, step: str) -> list[list[str]]:
    names = list(dict.fromkeys(run.tuning for run in measurement.runs if run.step == step))
    places = list(measurement.tunings)
    return [_row(measurement, step, name) for name in sorted(names, key=places.index)]


def _row(measurement: Measurement, step: str, name: str) -> list[str]:
    runs, shipped = measurement.runs_of(step, name), measurement.runs_of(step, SHIPPED)
    ratio = compare(runs, shipped, measurement.objective, measurement.target_ms).ratio
    kept = "kept" if measurement.kept[step] == name and step != CONFIRMATION else ""
    if step == CONFIRMATION and measurement.kept[step] == name:
        kept = "result"
    ratios = ["", "", ""] if name == SHIPPED else [f"{number:.2f}" for number in ratio]
    return [step, name, *_say_runs(runs), *ratios, kept]


def _say_runs(runs: Sequence[Run]) -> list[str]:
    """Show medians of the runs: throughput, latencies and CPU time; `failed` if one of them failed."""
    whole = [run for run in runs if run.latencies_s]
    if len(whole) < len(runs):
        return ["failed", "", "", ""]
    return [
        f"{statistics.median(run.clips_per_s for run in whole):.1f}",
        f"{statistics.median(run.percentile_ms(50) for run in whole):.1f}",
        f"{statistics.median(run.percentile_ms(95) for run in whole):.1f}",
        f"{statistics.median(run.cpu_ms_per_clip for run in whole):.1f}",
    ]
