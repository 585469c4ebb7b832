"""The plots of a sweep's report."""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carnelian_perf.pages import scale_milliseconds, write_plot
from carnelian_perf.sweeps.rows import STAGES, Row
from carnelian_perf.yardsticks.published import Published

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (
    *("#b3401f", "#2f6f8f", "#7a9a2e", "#8c5aa5", "#c9952b"),
    *("#404040", "#e39aa8", "#3fb5a3", "#6b4423", "#9fb4c7"),
)
_MARKERS = "os^Dv"
"""Markers of lines; the next one is used when all colours have been used."""
_WIDTH, _HEIGHT, _BAR_HEIGHT = 10.0, 4.0, 0.22
"""Sizes in inches: width and least height of a figure, and height of a bar."""
_NOTE_CHARACTERS, _NOTE_HEIGHT = 170, 0.2
"""Characters of a line below a figure, as fit into its width; and the line's height in inches."""


def draw_all(rows: Sequence[Row], published: Published, base: Path) -> list[Path]:
    """Draw the plots that the rows have numbers for; each plot shows the first model, precision and transport only.

    Throughput is drawn over loads, so two of them must have a stable round. A row without numbers is a gap in its line,
    or in the place of its bar, and is named with the reason.

    Args:
        rows: Rows of a sweep.
        published: Published latencies to draw beside static batches, by duration and batch; may be empty.
        base: The path of the files, to which `_NAME.png` is added.
    """
    static = [row for row in rows if row.cell.input == "pcm"]
    files = [row for row in rows if row.cell.input == "file"]
    drawn: dict[str, Figure] = {}
    if timed := _first_group(static, lambda row: bool(row.stable)):
        drawn["latency"] = _draw_latency(timed, published)
    if split := _first_group(static, lambda row: row.stages_fit):
        drawn["stages"] = _draw_stages(split)
    loaded = _first_group(files, lambda row: bool(row.stable))
    if len({(row.cell.concurrency, row.cell.poisson_share) for row in loaded if row.stable}) > 1:
        drawn["throughput"] = _draw_throughput(loaded)
    if counted := _first_group(files, lambda row: bool(row.acoustic_batches)):
        drawn["batches"] = _draw_batches(counted)
    paths = []
    for name, figure in drawn.items():
        paths.append(base.with_name(f"{base.name}_{name}.png"))
        write_plot(paths[-1], figure)
    return paths


def _first_group(rows: Sequence[Row], has_numbers: Callable[[Row], bool]) -> list[Row]:
    """List all rows of the first group in which one has numbers."""
    group = next((row.group for row in rows if has_numbers(row)), None)
    return [row for row in rows if row.group == group]


def _new(title: str, rows: Sequence[Row], columns: int = 2, height: float = _HEIGHT) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.suptitle(f"{title}: {', '.join(word for word in rows[0].group if word != 'none')}", fontsize=11)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _draw_latency(rows: Sequence[Row], published: Published) -> "Figure":
    figure, (over_batch, over_duration) = _new("Latency of a request", rows)
    durations = sorted({row.cell.duration_s for row in rows})
    for style, duration_s in zip(_styles(durations), durations, strict=True):
        colour = style["color"]
        found = [row for row in rows if row.cell.duration_s == duration_s]
        batches = [row.cell.batch for row in found]
        over_batch.plot(batches, [_latency_ms(row, "avg") for row in found], label=f"{duration_s:g} s", **style)
        over_batch.plot(batches, [_latency_ms(row, "p95") for row in found], ":.", color=colour)
        beside = sorted((batch, row.avg) for (length_s, batch), row in published.items() if length_s == duration_s)
        if beside:
            over_batch.plot(*zip(*beside, strict=True), "--", color=colour, alpha=0.5)
    lines = "line: mean, dots: p95" + (", dashes: published mean" if published else "")
    over_batch.set(xlabel="batch", ylabel=f"ms ({lines})")
    sizes = sorted({row.cell.batch for row in rows})
    _scale_values(over_batch, sizes)
    for style, batch in zip(_styles(sizes), sizes, strict=True):
        found = [row for row in rows if row.cell.batch == batch]
        seconds = [row.cell.duration_s for row in found]
        over_duration.plot(seconds, [_latency_ms(row, "avg") for row in found], label=f"batch {batch}", **style)
    over_duration.set(xlabel="seconds of each clip", ylabel="ms, mean")
    _scale_values(over_duration, durations)
    for axes in (over_batch, over_duration):
        scale_milliseconds(axes)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    _name_gaps(figure, rows)
    return figure


def _draw_stages(rows: Sequence[Row]) -> "Figure":
    bars: list[Mapping[str, float] | str] = []
    for row in rows:
        if row.stages_fit:
            parts_ms = {"client, network": row.client_ms or 0.0}
            parts_ms |= {stage: split.total for stage, split in row.stages.items()}
            bars.append({part: part_ms / row.latency_ms["avg"] for part, part_ms in parts_ms.items()})
        elif row.stages:
            bars.append("the stages take longer than the request")
        else:
            bars.append(_say_missing(row))
    labels = [f"{row.cell.duration_s:g} s x {row.cell.batch}" for row in rows]
    parts = ["client, network", *(stage for stage in STAGES if any(stage in row.stages for row in rows))]
    return _draw_bars("Where a request's mean time goes", rows, labels, bars, parts, "% of the mean latency", _COLOURS)


def _draw_throughput(rows: Sequence[Row]) -> "Figure":
    is_open = any(row.share for row in rows)
    figure, (throughput, *opens) = _new("Files, one per request", rows, columns=1 + is_open)
    durations = sorted({row.cell.duration_s for row in rows})
    for style, duration_s in zip(_styles(durations), durations, strict=True):
        closed = [row for row in rows if row.cell.duration_s == duration_s and row.cell.concurrency]
        throughput.plot(
            [row.cell.concurrency for row in closed],
            [row.clips_per_s if row.stable else math.nan for row in closed],
            label=f"{duration_s:g} s",
            **style,
        )
        opened = [row for row in rows if row.cell.duration_s == duration_s and row.cell.poisson_share]
        for latency in opens:
            latency.plot(
                [100 * (row.share or math.nan) for row in opened],
                [_latency_ms(row, "p95") for row in opened],
                label=f"{duration_s:g} s",
                **style,
            )
    _scale_values(throughput, sorted({row.cell.concurrency for row in rows if row.cell.concurrency}))
    throughput.set(xlabel="clients (closed loop)", ylabel="clips per second", ylim=(0, None))
    for latency in opens:
        latency.set(xlabel="Poisson arrivals, % of the highest throughput", ylabel="ms, p95")
        latency.set_xlim(0, max(100, latency.get_xlim()[1]))
        scale_milliseconds(latency)
    for axes in (throughput, *opens):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    _name_gaps(figure, rows)
    return figure


def _draw_batches(rows: Sequence[Row]) -> "Figure":
    sizes = sorted({size for row in rows for size in row.acoustic_batches})
    bars: list[Mapping[str, float] | str] = []
    for row in rows:
        clips = {f"{size}": size * count for size, count in row.acoustic_batches.items()}
        shares = {size: number / sum(clips.values()) for size, number in clips.items()}
        bars.append(shares or _say_missing(row))
    labels, parts = [row.title for row in rows], [f"{size}" for size in sizes]
    shades = [1 - 0.85 * (len(sizes) - 1 - place) / max(len(sizes) - 1, 1) for place in range(len(sizes))]
    of_what = "% of clips, by the size of their batch"
    return _draw_bars(
        "Batches that the acoustic stage formed",
        rows,
        labels,
        bars,
        parts,
        of_what,
        [("#b3401f", shade) for shade in shades],
    )


def _draw_bars(
    title: str,
    rows: Sequence[Row],
    labels: Sequence[str],
    bars: Sequence[Mapping[str, float] | str],
    parts: Sequence[str],
    of_what: str,
    colours: Sequence[Any],
) -> "Figure":
    """Draw a bar for each row, made of the shares of its parts; or, in its place, the words why it has none."""
    figure, (axes,) = _new(title, rows, columns=1, height=max(_HEIGHT, 1.5 + _BAR_HEIGHT * len(rows)))
    places, left = range(len(rows)), [0.0] * len(rows)
    for colour, part in zip(colours, parts, strict=False):
        percentages = [0.0 if isinstance(bar, str) else 100 * bar.get(part, 0.0) for bar in bars]
        axes.barh(places, percentages, left=left, label=part, color=colour, edgecolor="white")
        left = [before + percentage for before, percentage in zip(left, percentages, strict=True)]
    for place, bar in enumerate(bars):
        if isinstance(bar, str):
            axes.text(1, place, bar, fontsize=8, verticalalignment="center")
    axes.set_yticks(places, labels=labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(of_what)
    figure.legend(fontsize=8, ncols=min(len(parts), 12), loc="outside lower center")
    return figure


def _latency_ms(row: Row, name: str) -> float:
    """Return a latency of a row; not a number, which breaks a line, if no round is stable."""
    return row.latency_ms[name] if row.stable else math.nan


def _name_gaps(figure: "Figure", rows: Sequence[Row]) -> None:
    """Name below a figure of lines the cells that are gaps in them."""
    gaps = [f"{row.title} ({row.status})" for row in rows if not row.stable]
    if gaps:
        lines = textwrap.wrap(f"Left out: {'; '.join(gaps)}", _NOTE_CHARACTERS)
        figure.set_figheight(figure.get_figheight() + _NOTE_HEIGHT * len(lines))
        figure.supxlabel("\n".join(lines), fontsize=8)


def _say_missing(row: Row) -> str:
    return "not known" if row.stable else row.status


def _scale_values(axes: Any, values: Sequence[float]) -> None:
    """Give the x axis a logarithmic scale, with these values on it."""
    axes.set_xscale("log")
    axes.set_xticks(values, labels=[f"{value:g}" for value in values])
    axes.minorticks_off()


def _styles(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Make a style for each line, with its own colour and marker."""
    styles = itertools.cycle((marker, colour) for marker in _MARKERS for colour in _COLOURS)
    return [{"marker": marker, "color": colour} for (marker, colour), _ in zip(styles, items, strict=False)]
