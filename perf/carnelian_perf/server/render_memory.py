"""The raw file of a measurement of memory as a Markdown page and a plot."""

from pathlib import Path

from carnelian_perf.pages import page, show_plot, table, write_plot
from carnelian_perf.server.memory_results import (
    SETTLING_REQUESTS,
    SETTLING_SHARE,
    Measurement,
    Sample,
    Trend,
    find_trend,
)

MIB = 2**20


def render_page(measurement: Measurement, raw_name: str) -> str:
    """The Markdown page: a row for each process."""
    first, last = measurement.samples[0], measurement.samples[-1]
    head = ["process", "at rest, RSS", "PSS", "USS", "at the end, RSS", "PSS", "USS"]
    head += ["bytes a request", "95 % interval", "verdict"]
    rows = [*(_row(measurement, name) for name in first.processes), _row_of_all(measurement)]
    too_short = (
        f" Too short: memory grows, but some samples are of the first {SETTLING_REQUESTS} requests, in which it grows "
        "without a leak, too."
    )
    notes = [
        "MiB. RSS, PSS, USS: resident, proportional and unique set size. Bytes a request: the trend of the unique set "
        f"(for all, of the summed PSS) over the {len(measurement.settled())} samples after the first "
        f"{SETTLING_SHARE:.0%} of the requests; the median slope between pairs of samples, with Sen's interval. Flat: "
        "the interval allows less than 1 % of change over all requests."
        + (too_short if any(row[-1] == "too short" for row in rows) else ""),
        f"Load: {last.requests} clips as files in {measurement.wall_s:.0f} s, {measurement.concurrency} clients; "
        f"samples are taken with none in flight. Clips: {measurement.traffic}.",
        f"Shared memory in /dev/shm: {first.shared_memory_bytes / MIB:.1f} MiB at rest, "
        f"{last.shared_memory_bytes / MIB:.1f} at the end.",
        f"Machine: {measurement.say_machine()}. Other processes kept {measurement.others_busy_cores} cores "
        "busy before.",
        *measurement.say_sources(raw_name),
    ]
    parts = [table(head, rows), show_plot("Memory over requests", raw_name)]
    return page(f"{measurement.model}: memory over {last.requests} requests", measurement, parts, notes)


def trend_of(measurement: Measurement, name: str | None = None) -> Trend:
    """Find the trend of a process's unique set size, in bytes per request; without a name, of all processes' PSS."""
    settled = measurement.settled()
    sizes = [sample.pss if name is None else sample.processes[name].uss for sample in settled]
    return find_trend([sample.requests for sample in settled], sizes)


def draw(measurement: Measurement, path: Path) -> None:
    """Plot the PSS of all processes over requests, and the change of each unique set since memory settled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    total, each = figure.subplots(1, 2)
    samples, settled = measurement.samples, measurement.settled()
    requests = [sample.requests for sample in samples]
    total.plot(requests, [sample.pss / MIB for sample in samples], color="#b3401f", label="PSS of all processes")
    total.plot(requests, [s.shared_memory_bytes / MIB for s in samples], color="#2f6f8f", label="/dev/shm")
    total.set(xlabel="requests", ylabel="MiB", ylim=(0, None))
    total.legend(fontsize=8)
    for name in samples[0].processes:
        start = settled[0].processes[name].uss
        each.plot(
            [s.requests for s in settled], [(s.processes[name].uss - start) / MIB for s in settled], label=name, lw=1
        )
    each.set(xlabel="requests", ylabel="MiB since it settled, unique set")
    figure.legend(*each.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(f"{measurement.model}: memory over requests", fontsize=11)
    write_plot(path, figure)


def _row(measurement: Measurement, name: str) -> list[str]:
    sizes = [
        getattr(sample.processes[name], kind) / MIB
        for sample in (measurement.samples[0], measurement.samples[-1])
        for kind in ("rss", "pss", "uss")
    ]
    return [name, *(f"{size:.1f}" for size in sizes), *_say(trend_of(measurement, name))]


def _row_of_all(measurement: Measurement) -> list[str]:
    ends: list[Sample] = [measurement.samples[0], measurement.samples[-1]]
    sums = [cell for sample in ends for cell in ("", f"**{sample.pss / MIB:.1f}**", "")]
    return ["**all**", *sums, *_say(trend_of(measurement))]


def _say(trend: Trend) -> list[str]:
    return [f"{trend.slope:.0f}", f"{trend.low:.0f} to {trend.high:.0f}", trend.verdict]
