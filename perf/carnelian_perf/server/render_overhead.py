"""The raw file of a measurement of what serving costs as a Markdown page."""

import statistics
from operator import attrgetter

from carnelian_perf.pages import page, table
from carnelian_perf.raw_file import Split
from carnelian_perf.server.overhead_results import (
    ACOUSTIC,
    FILE,
    FILE_CLIENTS,
    IN_PROCESS,
    PCM,
    PCM_CLIENTS,
    STATIC,
    Measurement,
    Run,
)

ONE_AT_A_TIME = (IN_PROCESS, ACOUSTIC, PCM, FILE)
MANY = (STATIC, PCM_CLIENTS, FILE_CLIENTS)
LATENCY, CPU = attrgetter("latency_ms"), attrgetter("cpu_ms")


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
