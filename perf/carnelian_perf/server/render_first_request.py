"""The raw file of a measurement of a server's first requests as a Markdown page."""

from carnelian_perf.pages import page, say_busy, table
from carnelian_perf.server.first_request_results import Measurement

HEAD = ["duration s", "time of", "first ms", "second ms", "later ms", "rested ms"]
HEAD += ["first over later", "first over rested"]


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
