"""A sweep as pages that one can read: Markdown tables in the published layout, plots, and one HTML file of both."""

import base64
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote, unquote

from carnelian_perf.inference.results import AS_SERVED, Measurement, sum_up_served
from carnelian_perf.options import PRECISIONS
from carnelian_perf.pages import say_busy, table
from carnelian_perf.raw_file import command_line
from carnelian_perf.sweeps.grid import list_cells
from carnelian_perf.sweeps.plots import draw_all
from carnelian_perf.sweeps.results import GRID, Result, read_grid_of, read_results
from carnelian_perf.sweeps.rows import PERCENTILES, STAGES, Row, make_rows
from carnelian_perf.whole_file import write_whole
from carnelian_perf.yardsticks.published import PublishedLatency

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #b3401f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h1 { border-bottom: 3px solid var(--accent); padding-bottom: .3rem; }
div.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { text-align: right; } tbody tr:hover { background: #8882; }
img { max-width: 100%; background: white; border-radius: 6px; } code { overflow-wrap: anywhere; }
"""

Published = dict[tuple[float, int], PublishedLatency]


@dataclass(frozen=True)
class Unserved:
    """A model without a server."""

    how: str = ""
    """Precision and threads, in words; and which network, where its name is another."""
    median_ms: Mapping[tuple[float, int], float] = field(default_factory=dict)
    """By duration and batch; may be empty."""


def write_report(sweep: Path, published: Published, inference: Sequence[tuple[str | None, Path]] = ()) -> list[Path]:
    """Write a sweep's Markdown page, plots and HTML page beside its folder.

    Args:
        sweep: The folder of `carnelian-perf sweep`.
        published: The table to set beside it, by duration and batch; may be empty.
        inference: Raw files of `carnelian-perf infer` on the same machine, each with the sweep's model whose network it
            is of; None for the one of its own name.

    Returns:
        What was written: NAME.md, NAME_*.png, NAME.html.

    Raises:
        ValueError: the folder is not that of a sweep, or has no result of its grid, or `inference` has what is no raw
            file of one of its models, in its precision and on the same machine, or several of one model.
    """
    there, grid = {result.cell.name: result for result in read_results(sweep)}, read_grid_of(sweep)
    cells = [cell.name for cell in list_cells(grid)] if grid else list(there)
    results = [there[name] for name in cells if name in there]  # those of a larger grid stay in the folder
    missing = [name for name in cells if name not in there]
    if not results:
        raise ValueError(
            f"{sweep} must have results of its {GRID}, but its {len(there)} are of other cells: run `carnelian-perf "
            "sweep` with that grid, or with the earlier one"
        )
    rows = make_rows(results)
    base = sweep if sweep.name.strip(".") else sweep.resolve()  # `.` has no name
    unserved = _read_unserved(inference, results)
    plots = draw_all(rows, published, base)
    names, left_out = [path.name for path in plots], len(there) - len(results)
    page = render_page(rows, published, base.name, names, unserved, missing, left_out)
    markdown, html = (base.with_name(f"{base.name}.{ending}") for ending in ("md", "html"))
    write_whole(markdown, page)
    write_whole(html, render_html(page, base.parent))
    return [markdown, *plots, html]


def _read_unserved(inference: Iterable[tuple[str | None, Path]], results: Sequence[Result]) -> dict[str, Unserved]:
    models = sorted({result.cell.model for result in results})
    found: dict[str, Unserved] = {}
    for name, raw in inference:
        measurement = Measurement.read(raw)
        model = name or measurement.model
        if model not in models:
            raise ValueError(
                f"{raw} must be of a model of the sweep, {', '.join(models)}, but is of {model}: run `carnelian-perf "
                f"infer` on one of them, or name the one that it is of, as in --infer {models[0]}={raw}"
            )
        if model in found:
            raise ValueError(f"--infer must have one file for each model, but {raw} is another of {model}")
        _check_machine(raw, measurement, results)
        found[model] = _sum_up(raw, measurement, model, results)
    return found


def _check_machine(raw: Path, measurement: Measurement, results: Iterable[Result]) -> None:
    used = str(measurement.machine["accelerator"])
    for machine in [result.machine for result in results]:
        for key in ("cpu", "cores", "accelerator"):
            # A sweep names all GPUs that there are, `infer` the one that it used.
            is_among = key == "accelerator" and (used == "none" or used in str(machine[key]))
            if measurement.machine[key] != machine[key] and not is_among:
                raise ValueError(
                    f"{raw} must be of the sweep's machine, whose {key} is {machine[key]}, but is of "
                    f"{measurement.machine[key]}: run `carnelian-perf infer` there"
                )


def _sum_up(raw: Path, measurement: Measurement, model: str, results: Sequence[Result]) -> Unserved:
    precision = " and ".join(sorted({result.cell.precision for result in results if result.cell.model == model}))
    measured = measurement.plan["precision"]
    engine = "onnx_int8" if precision == "int8" else AS_SERVED
    if precision in PRECISIONS and precision != measured:  # others are words, for people
        raise ValueError(
            f"{raw} must be in {model}'s precision in the sweep, {precision}, but is in {measured}: run "
            "`carnelian-perf infer` with that --precision, or name another model, MODEL=RAW"
        )
    if not (median_ms := sum_up_served(measurement, engine)):
        raise ValueError(
            f"{raw} must have the engine that is served, {engine}, but has {', '.join(measurement.titles)}: "
            f"run `carnelian-perf infer` with --engines {engine}"
        )
    way = f"{measured if engine == AS_SERVED else precision}, {measurement.say_threads()}"
    if measurement.model != model:
        way = f"of {measurement.model}, {way}"
    used = measurement.machine["accelerator"]
    if any(result.machine["accelerator"] != used for result in results):
        way += ", on the CPU" if used == "none" else f", on {used}"
    return Unserved(way, median_ms)


def render_page(
    rows: Sequence[Row],
    published: Published,
    name: str,
    plots: Sequence[str],
    unserved: Mapping[str, Unserved],
    missing: Sequence[str] = (),
    num_left_out: int = 0,
) -> str:
    """The Markdown page; `unserved` is by model, `missing` are cells that have not been measured yet.

    `num_left_out` results are of cells that the grid has no longer, and not among the rows.
    """
    parts = [f"# {name}: latency over batch, duration and load\n", _describe(rows, published)]
    if missing:
        parts.append(f"**Not finished.** Cells without a result: {', '.join(missing)}.\n")
    if num_left_out:
        parts.append(f"**Left out:** {num_left_out} result(s) of cells that the grid has no longer.\n")
    for group, found in itertools.groupby(rows, key=lambda row: row.group):
        of_group = list(found)
        model, precision, protocol, memory = group
        backend = of_group[0].results[0].backend
        shared = "" if memory == "none" else f", {memory} shared memory"
        title = f"{model}, {precision}, {backend}, {protocol}{shared}"
        static = [row for row in of_group if row.cell.input == "pcm"]
        files = [row for row in of_group if row.cell.input == "file"]
        if static:
            parts += [
                f"## Batches of samples: {title}\n",
                render_static(static, published, unserved.get(model, Unserved())),
                render_split(static),
            ]
        if files:
            parts += [f"## Files, one per request: {title}\n", render_files(files), render_split(files)]
    parts += [f"![{plot}]({quote(plot)})\n" for plot in plots]
    return "\n".join(parts)


def render_static(rows: Sequence[Row], published: Published, unserved: Unserved) -> str:
    """Batches, one request at a time: the published layout, the published row beside each."""
    head = ["Duration s", "Batch", *PERCENTILES, *(f"published {name}" for name in PERCENTILES if published)]
    head += [*(["times as fast"] if published else []), "clips/s", "RTFx", "WER %", "CPU ms/clip"]
    head += ["in process", "serving adds"] if unserved.median_ms else []
    lines = []
    for row in rows:
        cells = [f"{row.cell.duration_s:g}", f"{row.cell.batch}"]
        beside = published.get((row.cell.duration_s, row.cell.batch))
        theirs = [_show(getattr(beside, name) if beside else None) for name in PERCENTILES if published]
        if not row.stable:
            lines.append([*cells, row.status, *[""] * (len(PERCENTILES) - 1), *theirs])
            continue
        latency = row.latency_ms
        cells += [_show(latency[name]) for name in PERCENTILES] + theirs
        if published:
            cells.append(f"{beside.avg / latency['avg']:.2f}" if beside else "-")
        cells += [f"{row.clips_per_s:.1f}", f"{row.rtfx:.0f}", _wer(row), _cpu(row)]
        alone = unserved.median_ms.get((row.cell.duration_s, row.cell.batch))
        lines.append([*cells, *([_show(alone), f"{latency['p50'] / alone - 1:+.0%}"] if alone else [])])
    note = (
        f"In process: features, network and decoding by `carnelian-perf infer`, {unserved.how}; serving adds to that "
        "at the median, less than nothing where the server's threads are more.\n\n"
    )
    return (note if unserved.median_ms else "") + table(head, lines) + _reasons(rows)


def render_files(rows: Sequence[Row]) -> str:
    """Files, in closed and open loops."""
    head = [
        "Duration s",
        "Load",
        "p50",
        *PERCENTILES,
        "clips/s",
        "RTFx",
        "WER %",
        "mean batch",
        "late %",
        "CPU ms/clip",
    ]
    lines = []
    for row in rows:
        cells = [f"{row.cell.duration_s:g}", row.load]
        if not row.stable:
            lines.append([*cells, row.status])
            continue
        latency = row.latency_ms
        cells += [_show(latency[name]) for name in ("p50", *PERCENTILES)]
        cells += [f"{row.clips_per_s:.1f}", f"{row.rtfx:.0f}", _wer(row), _show(row.mean_batch)]
        lines.append([*cells, f"{row.delayed_percent:.0f}" if row.cell.poisson_share else "", _cpu(row)])
    return table(head, lines) + _reasons(rows)


def render_split(rows: Sequence[Row]) -> str:
    """Each stage's queue + input + infer + output, and what the ensemble costs over its acoustic stage."""
    stable = [row for row in rows if row.stages]
    if not stable:
        return ""
    stages = [stage for stage in STAGES if stage in stable[0].stages]
    head = ["Duration s", "Load", "client and network", *stages, "all", "over acoustic"]
    lines = []
    for row in stable:
        found, everything = row.stages, row.latency_ms["avg"]
        over = everything / found["acoustic"].total - 1
        cells = [
            f"{row.cell.duration_s:g}",
            row.load,
            _show(row.client_ms),
            *(str(found[stage]) for stage in stages),
        ]
        lines.append([*cells, _show(everything), f"{over:+.0%}"])
    legend = "Where the mean request's milliseconds go: queue + input + **infer** + output of each stage.\n\n"
    return legend + table(head, lines)


def render_html(page: str, folder: Path) -> str:
    """The Markdown page as one HTML file, its plots inside."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)

    def embed(found: re.Match[str]) -> str:
        content = base64.b64encode((folder / unquote(found[1])).read_bytes()).decode()
        return f'src="data:image/png;base64,{content}"'

    body = re.sub(r'src="([^":]+\.png)"', embed, body)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    title = page.splitlines()[0].removeprefix("# ")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}</body></html>\n'
    )


def _describe(rows: Sequence[Row], published: Published) -> str:
    results = [result for row in rows for result in row.results]
    first, busy = results[0], sorted(result.others_busy_cores for result in results)
    counts = {status: sum(result.status == status for result in results) for status in ("stable", "unstable", "failed")}
    dates = sorted(result.date for result in results)
    commits = sorted({result.commit or "none" for result in results})
    machines = dict.fromkeys(result.say_machine() for result in results)
    versions = dict.fromkeys(result.say_versions() for result in results)
    speech, accuracy = first.speech, first.accuracy
    rounds = [len(row.results) for row in rows]
    fewest, most = min(rounds), max(rounds)
    facts = [
        "Latencies are milliseconds of a request, medians of the stable ones of "
        f"{f'{fewest} to {most} rounds' if fewest < most else f'{most} round(s)'}, by Triton's perf_analyzer; RTFx: "
        "seconds of audio per second. A batch has clips of equal length, and one request is in flight.",
        f"Runs: {', '.join(f'{count} {status}' for status, count in counts.items())}."
        + ("" if counts["failed"] else " Each checked its transcripts."),
        f"The timed clips are {speech.clips} of each duration, cut from {speech.manifest}. "
        + (
            f"WER: of its whole clips, {accuracy['utterances']:.0f} with {accuracy['words']:.0f} words."
            if accuracy
            else "The weights are random, so there is no WER: speed does not depend on them."
        ),
        f"Machine: {'; '.join(machines)}. Other processes {say_busy(busy)} just before the runs"
        + ("." if busy[len(busy) // 2] < 0.2 else ": latencies hold beside each other, not by themselves."),
        *([] if all(result.one_server for result in results) else [_SEVERAL]),
        f"Versions: {'; '.join(versions)}.",
        f"{dates[0]} to {dates[-1]}, commit {', '.join(commits)}. This page: `{command_line()}`.",
    ]
    if published:
        title = next(iter(published.values())).title
        facts.append(f"Published: {title} ([source]({_SOURCE})), another machine. Times as fast: their mean over ours.")
    return "".join(f"- {fact}\n" for fact in facts)


_SEVERAL = (
    "Several servers answered at one address: latencies and throughput are of all together; times by stage and batch "
    "sizes are not known, since each server counts its own."
)
_SOURCE = "https://github.com/NVIDIA/DeepLearningExamples/tree/729963dd/PyTorch/SpeechRecognition"


def _reasons(rows: Sequence[Row]) -> str:
    """Why some rounds have no numbers, as a list below the table."""
    found = [f"- {row.cell.duration_s:g} s, {row.load}: {words}\n" for row in rows for words in row.troubles]
    return "".join(["\n", *found]) if found else ""


def _wer(row: Row) -> str:
    return "-" if row.wer is None else f"{100 * row.wer:.1f}"


def _cpu(row: Row) -> str:
    return "-" if row.cpu_ms_per_clip is None else f"{row.cpu_ms_per_clip:.1f}"


def _show(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"
