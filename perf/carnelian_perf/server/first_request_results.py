"""The results of a server's first requests: the raw file, its summary and its page."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carnelian_perf.pages import page, say_busy, table
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech

HEAD = ["duration s", "time of", "first ms", "second ms", "later ms", "rested ms"]
HEAD += ["first over later", "first over rested"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests of a fresh server; milliseconds of each, in the order in which they were sent.

    First come the requests in a row, then those after a rest each.
    """

    duration_s: float
    """Duration of each clip, in seconds."""
    round: int
    others_busy_cores: float
    """Cores that other processes kept busy just before the server was started."""
    client_ms: list[float]
    """Milliseconds from the call to its answer, as the client measures them."""
    ensemble_ms: list[float]
    """Milliseconds from arrival to answer, as Triton counts them."""
    stages_ms: dict[str, list[float]]
    """Stage -> milliseconds of queue, input, infer and output together, as Triton counts them."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf first-request`."""

    subject: Literal["first-request"] = "first-request"
    speech: Speech
    requests: int
    """Number of requests in a row to each server; those after a rest come on top."""
    rest_s: float
    """Seconds of rest before the first request, and before each request after the row."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """Return the durations of the clips in seconds, ascending."""
        return sorted({run.duration_s for run in self.runs})

    def summarise(self, rounds: Sequence[list[float]]) -> "Summary":
        """Summarise rounds of one duration, each given as the times of the client, the ensemble or a stage."""
        first = [times[0] for times in rounds]
        settled = [statistics.median(times[self.requests // 2 : self.requests]) for times in rounds]
        rested = [statistics.median(times[self.requests :]) for times in rounds]
        return Summary(
            first_ms=statistics.median(first),
            second_ms=statistics.median(times[1] for times in rounds),
            settled_ms=statistics.median(settled),
            rested_ms=statistics.median(rested),
            over_settled=Ratio.of(first, settled),
            over_rested=Ratio.of(first, rested),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The times of the first request and of later ones, as medians of the rounds."""

    first_ms: float
    second_ms: float
    settled_ms: float
    """Later requests: in each round, the median of the last half of the row."""
    rested_ms: float
    """Requests after a rest: in each round, their median."""
    over_settled: Ratio
    """The first request's time divided by that of later ones, round by round."""
    over_rested: Ratio


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for the request as a whole and for each stage, by duration."""
    speech = measurement.speech
    rounds = len({run.round for run in measurement.runs})
    notes = [
        f"Each duration and round has a server of its own, which takes {measurement.requests} single clips as "
        f"{speech.format.upper()} files in a row, {measurement.rest_s:g} s after it says that it is ready. Medians "
        f"of {rounds} rounds. Later: the median of the last half of that row.",
        f"Rested: the median of {len(measurement.runs[0].client_ms) - measurement.requests} requests after the row, "
        f"each after a rest of {measurement.rest_s:g} s. Any request is slower after a rest. The first one also "
        "follows a rest, so over rested is the fair comparison.",
        "First over later, over rested: ratios of the same round; the median, and in brackets the least and the "
        "greatest.",
        "The connection is open before the first clip is sent: what connecting costs a client is not in these times.",
        "Request: from the call to its answer, as the client measures it. Ensemble: from arrival to answer, as Triton "
        "counts it. Stages: queue, input, infer and output, as Triton counts them. Stage times may overlap, so they "
        "need not add up to the ensemble's.",
        f"Speech: {speech.manifest}, cut to the duration: {speech.clips} clips; each round begins with another one.",
        f"Machine: {measurement.say_machine()}. Other processes "
        f"{say_busy(run.others_busy_cores for run in measurement.runs)} before the servers were started.",
        *measurement.say_sources(raw_name),
    ]
    rows = [row for duration_s in measurement.durations_s() for row in _rows(measurement, duration_s)]
    return page(f"{measurement.model}: the first requests to a fresh server", measurement, [table(HEAD, rows)], notes)


def _rows(measurement: Measurement, duration_s: float) -> list[list[str]]:
    runs = [run for run in measurement.runs if run.duration_s == duration_s]
    times = {"**request**": [run.client_ms for run in runs], "ensemble": [run.ensemble_ms for run in runs]}
    for stage in runs[0].stages_ms:
        times[stage.removeprefix(f"{measurement.model}_")] = [run.stages_ms[stage] for run in runs]
    rows = []
    for name, rounds in times.items():
        summary = measurement.summarise(rounds)
        times_ms = (summary.first_ms, summary.second_ms, summary.settled_ms, summary.rested_ms)
        ratios = [str(summary.over_settled), str(summary.over_rested)]
        rows.append([f"{duration_s:g}", name, *(f"{ms:.2f}" for ms in times_ms), *ratios])
    return rows
