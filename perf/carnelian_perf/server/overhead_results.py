"""The results of what serving costs: the raw file, with ways to transcribe the same clips in turns, and its page."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from carnelian_perf.pages import page, table
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Filled, Record, Speech, Split

IN_PROCESS, ACOUSTIC, PCM, FILE = "in_process", "acoustic", "pcm", "file"
STATIC, PCM_CLIENTS, FILE_CLIENTS = "static", "pcm_clients", "file_clients"
"""Names of the ways with many clips; the line above names those with one clip at a time."""
ONE_AT_A_TIME = (IN_PROCESS, ACOUSTIC, PCM, FILE)
MANY = (STATIC, PCM_CLIENTS, FILE_CLIENTS)
LATENCY, CPU = attrgetter("latency_ms"), attrgetter("cpu_ms")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One turn of one way."""

    way: str
    duration_s: float
    """Duration of each clip, in seconds."""
    round: int
    clips: int
    wall_s: float
    latencies_s: list[float]
    """Seconds that each request took."""
    cpu_s: float
    """CPU seconds of the server and its models, all cores together; of the measuring process for `in_process`."""
    stages: dict[str, Split]
    """Stage -> mean time of its requests."""

    @property
    def latency_ms(self) -> float:
        """The median latency of a request, in milliseconds."""
        return 1e3 * statistics.median(self.latencies_s)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per clip."""
        return 1e3 * self.cpu_s / self.clips

    @property
    def clips_per_s(self) -> float:
        """Throughput, in clips per second."""
        return self.clips / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf overhead`."""

    subject: Literal["overhead"] = "overhead"
    others_busy_cores: float
    """Cores that other processes kept busy before the measurement."""
    clients: int
    """Number of clients that send single clips at the same time."""
    batch: int
    """Number of clips in a ready-made batch."""
    speech: Speech
    ways: dict[str, str]
    """Name -> title, in the order of the tables."""
    runs: Filled[Run]

    def durations_s(self) -> list[float]:
        """Return the durations of the clips in seconds, in the order in which they were measured."""
        return list(dict.fromkeys(run.duration_s for run in self.runs))

    def runs_of(self, way: str, duration_s: float) -> list[Run]:
        """Return the runs of one way and duration, in the order of the rounds."""
        found = [run for run in self.runs if (run.way, run.duration_s) == (way, duration_s)]
        return sorted(found, key=lambda run: run.round)

    def ratio(self, way: str, other: str, duration_s: float, measure: Callable[[Run], float]) -> Ratio:
        """Divide the `measure` of one way by that of another, round by round, for clips of one duration."""
        return Ratio.of(map(measure, self.runs_of(way, duration_s)), map(measure, self.runs_of(other, duration_s)))


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: tables of one clip at a time and of many clips, with a row for each duration and way."""
    rounds = len({run.round for run in measurement.runs})
    notes = [
        f"Medians of {rounds} rounds. In each, every way takes the same {measurement.speech.clips} clips; the order of "
        "the ways changes. Ratios are of the same round: the median, and in brackets the least and the greatest.",
        "CPU: of the server and its models, all cores together; in process, of that process. The client is left out.",
        "In process: the served graph in ONNX Runtime, with as many threads, on features that the server made.",
        f"Speech: {measurement.speech.manifest}, cut to the duration.",
        f"Machine: {measurement.say_machine()}. Other processes kept {measurement.others_busy_cores} cores "
        "busy before.",
        *measurement.say_sources(raw_name),
    ]
    parts = [
        "## One clip at a time\n",
        _render_one(measurement),
        "Mean milliseconds of a request in each stage: queue + input + **infer** + output.\n",
        _render_stages(measurement),
        f"## {measurement.clients} clients with single clips, compared with batches of {measurement.batch}\n",
        _render_many(measurement),
    ]
    return page(f"{measurement.model}: what serving costs", measurement, parts, notes)


def _render_one(measurement: Measurement) -> str:
    longer = "longer than the acoustic model in process, by the clock"
    head, rows = ("duration s", "what", "ms, median", "CPU ms", longer, "by CPU time"), []
    for duration_s in measurement.durations_s():
        for way in ONE_AT_A_TIME:
            runs = measurement.runs_of(way, duration_s)
            cells = [f"{duration_s:g}", measurement.ways[way], *_medians(runs)]
            for measure in (LATENCY, CPU):
                cells.append(_percent(*measurement.ratio(way, IN_PROCESS, duration_s, measure)))
            rows.append(cells)
    return table(head, rows)


def _render_stages(measurement: Measurement) -> str:
    stages = list(dict.fromkeys(stage for run in measurement.runs if run.way == FILE for stage in run.stages))
    head = ["duration s", "what", *(stage.removeprefix(f"{measurement.model}_") for stage in stages)]
    rows = []
    for duration_s in measurement.durations_s():
        for way in (PCM, FILE):
            cells = [f"{duration_s:g}", measurement.ways[way]]
            cells += [_split(measurement.runs_of(way, duration_s), stage) for stage in stages]
            rows.append(cells)
    return table(head, rows)


def _render_many(measurement: Measurement) -> str:
    over = f"clips/s over batches of {measurement.batch}"
    head, rows = ("duration s", "what", "clips/s", "CPU ms/clip", over, "CPU over theirs"), []
    for duration_s in measurement.durations_s():
        for way in MANY:
            runs = measurement.runs_of(way, duration_s)
            cells = [f"{duration_s:g}", measurement.ways[way]]
            cells += [f"{statistics.median(run.clips_per_s for run in runs):.1f}", _medians(runs)[1]]
            for measure in (attrgetter("clips_per_s"), CPU):
                cells.append(str(measurement.ratio(way, STATIC, duration_s, measure)))
            rows.append(cells)
    return table(head, rows)


def _medians(runs: list[Run]) -> list[str]:
    return [f"{statistics.median(map(measure, runs)):.1f}" for measure in (LATENCY, CPU)]


def _percent(*ratios: float) -> str:
    middle, low, high = (f"{100 * (ratio - 1):+.0f}" for ratio in ratios)
    return f"{middle} % ({low} to {high})"


def _split(runs: list[Run], stage: str) -> str:
    splits = [run.stages[stage] for run in runs if stage in run.stages]
    return str(Split.median(splits)) if splits else ""
