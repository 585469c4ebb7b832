"""The plots of a sweep's report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carnelian_perf.pages import scale_milliseconds, write_plot
from carnelian_perf.sweeps.rows import STAGES, Row
from carnelian_perf.yardsticks.published import PublishedLatency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#b3401f", "#2f6f8f", "#7a9a2e", "#8c5aa5", "#c9952b")
_WIDTH, _HEIGHT = 10.0, 4.0


def draw_all(rows: Sequence[Row], published: dict[tuple[float, int], PublishedLatency], base: Path) -> list[Path]:
    """Draw what the rows have numbers for, of their first model, precision and transport each.

    Args:
        rows: Of a sweep.
        published: Beside which static batches are drawn.
        base: The path of the files, to which `_NAME.png` is added.
    """
    stable = [row for row in rows if row.stable]
    static = [row for row in stable if row.cell.input == "pcm"]
    files = [row for row in stable if row.cell.input == "file"]
    drawn: dict[str, Figure] = {}
    if static:
        drawn["latency"] = _draw_latency(_first_group(static), published)
    if split := [row for row in static if row.stages]:
        drawn["stages"] = _draw_stages(_first_group(split))
    if files:
        drawn["throughput"] = _draw_throughput(_first_group(files))
    if counted := [row for row in files if row.acoustic_batches]:
        drawn["batches"] = _draw_batches(_first_group(counted))
    paths = []
    for name, figure in drawn.items():
        paths.append(base.with_name(f"{base.name}_{name}.png"))
        write_plot(paths[-1], figure)
    return paths


def _first_group(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.group == rows[0].group]


def _new(title: str, rows: Sequence[Row], columns: int = 2) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    figure.suptitle(f"{title}: {', '.join(word for word in rows[0].group if word != 'none')}", fontsize=11)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _draw_latency(rows: Sequence[Row], published: dict[tuple[float, int], PublishedLatency]) -> "Figure":
    figure, (over_batch, over_duration) = _new("Latency of a request", rows)
    durations = sorted({row.cell.duration_s for row in rows})
    for colour, duration_s in zip(_cycle(durations), durations, strict=True):
        found = [row for row in rows if row.cell.duration_s == duration_s]
        batches = [row.cell.batch for row in found]
        over_batch.plot(
            batches, [row.latency_ms["avg"] for row in found], "o-", color=colour, label=f"{duration_s:g} s"
        )
        over_batch.plot(batches, [row.latency_ms["p95"] for row in found], ":", color=colour)
        beside = sorted((batch, row.avg) for (length_s, batch), row in published.items() if length_s == duration_s)
        if beside:
            over_batch.plot(*zip(*beside, strict=True), "--", color=colour, alpha=0.5)
    lines = "line: mean, dots: p95" + (", dashes: published mean" if published else "")
    over_batch.set(xlabel="batch", ylabel=f"ms ({lines})", xscale="log")
    sizes = sorted({row.cell.batch for row in rows})
    over_batch.set_xticks(sizes, labels=sizes)
    over_batch.minorticks_off()
    for colour, batch in zip(_cycle(sizes), sizes, strict=True):
        found = [row for row in rows if row.cell.batch == batch]
        seconds = [row.cell.duration_s for row in found]
        over_duration.plot(
            seconds, [row.latency_ms["avg"] for row in found], "o-", color=colour, label=f"batch {batch}"
        )
    over_duration.set(xlabel="seconds of each clip", ylabel="ms, mean")
    over_duration.set_xticks(durations, labels=[f"{duration_s:g}" for duration_s in durations])
    for axes in (over_batch, over_duration):
        scale_milliseconds(axes)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


def _draw_stages(rows: Sequence[Row]) -> "Figure":
    figure, (axes,) = _new("Where a request's mean time goes", rows, columns=1)
    labels = [f"{row.cell.duration_s:g} s x {row.cell.batch}" for row in rows]
    bottom = [0.0] * len(rows)
    parts = {"client, network": [(row.client_ms or 0.0) / row.latency_ms["avg"] for row in rows]}
    for stage in STAGES:
        if stage in rows[0].stages:
            parts[stage] = [row.stages[stage].total / row.latency_ms["avg"] for row in rows]
    for colour, (part, shares) in zip(_cycle(list(parts)), parts.items(), strict=True):
        axes.bar(labels, [100 * share for share in shares], bottom=bottom, label=part, color=colour)
        bottom = [below + 100 * share for below, share in zip(bottom, shares, strict=True)]
    axes.set_ylabel("% of the mean latency")
    axes.tick_params(axis="x", rotation=45)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    return figure


def _draw_throughput(rows: Sequence[Row]) -> "Figure":
    is_open = any(row.cell.poisson_share for row in rows)
    figure, (throughput, *opens) = _new("Files, one per request", rows, columns=1 + is_open)
    durations = sorted({row.cell.duration_s for row in rows})
    for colour, duration_s in zip(_cycle(durations), durations, strict=True):
        closed = [row for row in rows if row.cell.duration_s == duration_s and row.cell.concurrency]
        throughput.plot(
            [row.cell.concurrency for row in closed],
            [row.clips_per_s for row in closed],
            "o-",
            color=colour,
            label=f"{duration_s:g} s",
        )
        opened = [row for row in rows if row.cell.duration_s == duration_s and row.cell.poisson_share]
        for latency in opens:
            latency.plot(
                [100 * (row.cell.poisson_share or 0) for row in opened],
                [row.latency_ms["p95"] for row in opened],
                "o-",
                color=colour,
                label=f"{duration_s:g} s",
            )
    throughput.set_xticks(sorted({row.cell.concurrency for row in rows if row.cell.concurrency}))
    throughput.set(xlabel="clients (closed loop)", ylabel="clips per second", ylim=(0, None))
    for latency in opens:
        latency.set(xlabel="Poisson arrivals, % of the highest throughput", ylabel="ms, p95", xlim=(0, 100))
        scale_milliseconds(latency)
    for axes in (throughput, *opens):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


def _draw_batches(rows: Sequence[Row]) -> "Figure":
    figure, (axes,) = _new("Batches that the acoustic stage formed", rows, columns=1)
    labels = [f"{row.cell.duration_s:g} s, {row.load}" for row in rows]
    sizes = sorted({size for row in rows for size in row.acoustic_batches})
    left = [0.0] * len(rows)
    for place, size in enumerate(sizes):
        shares = []
        for row in rows:
            clips = sum(number * count for number, count in row.acoustic_batches.items())
            shares.append(100 * size * row.acoustic_batches.get(size, 0) / clips)
        shade = 1 - 0.85 * (len(sizes) - 1 - place) / max(len(sizes) - 1, 1)
        axes.barh(labels, shares, left=left, label=f"{size}", color="#b3401f", alpha=shade, edgecolor="white")
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of clips, by the size of their batch")
    axes.legend(fontsize=8, ncols=min(len(sizes), 12), loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure


def _cycle(items: Sequence[Any]) -> list[str]:
    return [_COLOURS[place % len(_COLOURS)] for place in range(len(items))]
