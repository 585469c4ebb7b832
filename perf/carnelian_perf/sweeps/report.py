"""The report of a sweep: Markdown tables in the published layout, plots, and one HTML file with both."""

import base64
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote, unquote

from carnelian_perf.pages import rendering, say_busy, table
from carnelian_perf.raw_file import command_line
from carnelian_perf.sweeps.grid import list_cells
from carnelian_perf.sweeps.plots import draw_all
from carnelian_perf.sweeps.results import GRID, SEVERAL_SERVERS, Result, read_grid_of, read_results
from carnelian_perf.sweeps.rows import LATENCIES, PUBLISHED, STAGES, Row, make_rows
from carnelian_perf.sweeps.transcripts import rounding_cer
from carnelian_perf.sweeps.unserved import Unserved, read_unserved
from carnelian_perf.whole_file import write_whole
from carnelian_perf.yardsticks.published import Published

_SOURCE = "https://github.com/NVIDIA/DeepLearningExamples/tree/729963dd/PyTorch/SpeechRecognition"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #b3401f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
h1 { border-bottom: 3px solid var(--accent); padding-bottom: .3rem; }
div.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } th { text-align: left; vertical-align: bottom; } tbody tr:hover { background: #8882; }
img { max-width: 100%; background: white; border-radius: 6px; } code { overflow-wrap: anywhere; }
@page { size: A4 landscape; margin: 1cm; }
@media print { div.table { overflow: visible; } table { font-size: 60%; } th, td { padding: .1rem .3rem; } }
"""


def write_report(sweep: Path, published: Published, inference: Sequence[tuple[str | None, Path]] = ()) -> list[Path]:
    """Write a sweep's Markdown page, plots and HTML page beside its folder.

    Args:
        sweep: The folder of `carnelian-perf sweep`.
        published: The published table to show beside it, by duration and batch; may be empty.
        inference: Raw files of `carnelian-perf infer` on the same machine, each with the name of the sweep's model that
            it belongs to; None if the raw file has the same name.

    Returns:
        The files that were written: NAME.md, NAME_*.png, NAME.html.

    Raises:
        ValueError: The folder is not that of a sweep, has no result of its grid, has a result that no page can be made
            of, or has rounds of a cell on two machines; or a file of `inference` is not a raw file of one of the
            models, in its precision and on the same machine, or is the second one of a model.
    """
    there, grid = {result.cell.name: result for result in read_results(sweep)}, read_grid_of(sweep)
    cells = [cell.name for cell in list_cells(grid)] if grid else list(there)
    results = [there[name] for name in cells if name in there]  # results of a larger grid stay
    missing = [name for name in cells if name not in there]
    if not results:
        raise ValueError(
            f"{sweep} must have results of its {GRID}, but its {len(there)} are of other cells: run `carnelian-perf "
            "sweep` with that grid, or with the earlier one"
        )
    base = sweep if sweep.name.strip(".") else sweep.resolve()  # `.` has no name
    unserved = read_unserved(inference, results)
    rows = make_rows([result.as_text() for result in results])
    with rendering(sweep):
        page = render_page(rows, published, base.name, unserved, missing, len(there) - len(results))
    plots = draw_all(rows, published, base)
    if plots and len({row.group for row in rows}) > 1:
        page += "\nEach plot shows one model, precision and transport, which its title names; the tables have all.\n"
    page += "".join(f"\n![{plot.name}]({quote(plot.name)})\n" for plot in plots)
    markdown, html = (base.with_name(f"{base.name}.{ending}") for ending in ("md", "html"))
    write_whole(markdown, page)
    write_whole(html, render_html(page, plots))
    return [markdown, *plots, html]


def render_page(
    rows: Sequence[Row],
    published: Published,
    name: str,
    unserved: Mapping[str, Unserved],
    missing: Sequence[str] = (),
    num_left_out: int = 0,
) -> str:
    """Make the Markdown page, without plots.

    Args:
        rows: Rows of the sweep.
        published: The published table to show beside it, by duration and batch; may be empty.
        name: Name of the sweep.
        unserved: Model -> its speed without a server.
        missing: Names of the cells that have not been measured yet.
        num_left_out: Number of results whose cells are no longer in the grid; they are not among the rows.
    """
    parts = [f"# {name}: latency over batch, duration and load\n", _describe(rows, published)]
    if missing:
        parts.append(f"**Not finished.** Cells without a result: {', '.join(missing)}.\n")
    if num_left_out:
        parts.append(f"**Left out:** results of cells that are no longer in the grid ({num_left_out}).\n")
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
            kind = files[0].results[0].speech.format.upper()
            parts += [f"## {kind} files, one per request: {title}\n", render_files(files), render_split(files)]
    return "\n".join(parts)


def render_static(rows: Sequence[Row], published: Published, unserved: Unserved) -> str:
    """Make the table of batches, one request at a time, in the published layout with published numbers beside ours."""
    head = ["Duration s", "Batch", "requests", *LATENCIES, *(f"published {name}" for name in PUBLISHED if published)]
    head += [*(["times as fast"] if published else []), "clips/s", "RTFx", "WER %", "CPU ms/clip"]
    head += ["in process", "serving adds"] if unserved.median_ms else []
    lines = []
    for row in rows:
        cells = [f"{row.cell.duration_s:g}", f"{row.cell.batch}"]
        beside = published.get((row.cell.duration_s, row.cell.batch))
        theirs = [_show(getattr(beside, name) if beside else None) for name in PUBLISHED if published]
        if not row.stable:
            lines.append([*cells, row.status, *[""] * len(LATENCIES), *theirs])
            continue
        latency = row.latency_ms
        cells += [row.requests, *(_show(latency[name]) for name in LATENCIES), *theirs]
        if published:
            cells.append(f"{beside.avg / latency['avg']:.2f}" if beside else "-")
        cells += [f"{row.clips_per_s:.1f}", f"{row.rtfx:.0f}", _wer(row), _cpu(row)]
        alone = unserved.median_ms.get((row.cell.duration_s, row.cell.batch))
        lines.append([*cells, *([_show(alone), f"{latency['p50'] / alone - 1:+.0%}"] if alone else [])])
    note = (
        f"In process: features, network and decoding by `carnelian-perf infer`, {unserved.how}. Serving adds: the "
        "server's median over that one. It is negative if the server uses more threads.\n\n"
    )
    return (note if unserved.median_ms else "") + table(head, lines) + _reasons(rows)


def render_files(rows: Sequence[Row]) -> str:
    """Make the table of files, one per request, in closed and open loops."""
    head = [
        "Duration s",
        "Load",
        "requests",
        *LATENCIES,
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
        cells += [row.requests, *(_show(latency[name]) for name in LATENCIES)]
        cells += [f"{row.clips_per_s:.1f}", f"{row.rtfx:.0f}", _wer(row), _show(row.mean_batch)]
        lines.append([*cells, f"{row.delayed_percent:.0f}" if row.cell.poisson_share else "", _cpu(row)])
    return table(head, lines) + _reasons(rows)


def render_split(rows: Sequence[Row]) -> str:
    """Make the table of each stage's queue + input + infer + output, and of the ensemble over its acoustic stage."""
    stable = [row for row in rows if row.stages]
    if not stable:
        return ""
    stages = [stage for stage in STAGES if stage in stable[0].stages]
    head = ["Duration s", "Load", "client and network", *stages, "all", "over acoustic"]
    lines = []
    for row in stable:
        found, everything = row.stages, row.latency_ms["avg"]
        over = f"{everything / found['acoustic'].total - 1:+.0%}" if row.stages_fit else "-"
        cells = [
            f"{row.cell.duration_s:g}",
            row.load,
            _show(row.client_ms),
            *(str(found[stage]) for stage in stages),
        ]
        lines.append([*cells, _show(everything), over])
    legend = "Where the mean request's milliseconds go: queue + input + **infer** + output of each stage.\n\n"
    return legend + table(head, lines)


def render_html(page: str, plots: Sequence[Path]) -> str:
    """Convert the Markdown page to one HTML file that contains its plots and no other image."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)

    def embed(found: re.Match[str]) -> str:
        plot = by_name.get(unquote(found[1]))
        return f'src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}"' if plot else 'src=""'

    by_name = {plot.name: plot for plot in plots}
    body = re.sub(r'src="([^"]*)"', embed, body)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    title = page.splitlines()[0].removeprefix("# ")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}</body></html>\n'
    )


def _describe(rows: Sequence[Row], published: Published) -> str:
    results = [result for row in rows for result in row.results]
    facts = [
        _say_columns(rows),
        _say_runs(results),
        _say_speech(results),
        _say_machine(results),
        *([] if all(result.one_server for result in results) else [SEVERAL_SERVERS]),
        f"Versions: {'; '.join(dict.fromkeys(result.say_versions() for result in results))}.",
        _say_origin(results),
        *([_say_published(rows, published)] if published else []),
    ]
    return "".join(f"- {fact}\n" for fact in facts)


def _say_columns(rows: Sequence[Row]) -> str:
    rounds = [len(row.results) for row in rows]
    fewest, most = min(rounds), max(rounds)
    return (
        "Latencies are milliseconds of a request, by Triton's perf_analyzer. "
        + (f"Each is the median over the stable rounds (of {f'{fewest} to ' * (fewest < most)}{most}). " * (most > 1))
        + "Requests: how many were timed in a round. RTFx: seconds of audio per second. A batch has clips of equal "
        "length, and one request is in flight."
    )


def _say_runs(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in ("stable", "unstable", "failed")}
    over = ", over gRPC" if any(result.cell.protocol == "http" for result in results) else ""
    limits = dict.fromkeys(
        f"{result.stability_percent:g} %, each of at least {result.least_requests} requests" for result in results
    )
    return (
        f"Runs: {', '.join(f'{count} {status}' for status, count in counts.items())}."
        + ("" if counts["failed"] else f" Each checked its transcripts{over}.")
        + f" Stable: the last three windows agree within {'; '.join(limits)}."
    )


def _say_speech(results: Sequence[Result]) -> str:
    speech, accuracy = results[0].speech, results[0].accuracy
    said = f"The timed clips are {speech.clips} of each duration, cut from {speech.manifest}. "
    if accuracy:
        return f"{said}WER is measured on its {accuracy['utterances']:.0f} whole clips ({accuracy['words']:.0f} words)."
    said += "The weights are random, so there is no WER: speed does not depend on them."
    allowed = [rounding_cer(result.cell.precision, str(result.machine["accelerator"])) for result in results]
    if not any(allowed):
        return said
    rounded = dict.fromkeys(
        f"{result.cell.model} ({result.cell.precision})" for result, cer in zip(results, allowed, strict=True) if cer
    )
    of_some = "" if all(allowed) else f" of {', '.join(rounded)}"
    return f"{said} Rounding may change {max(allowed):.0%} of a transcript's characters{of_some}."


def _say_machine(results: Sequence[Result]) -> str:
    machines = dict.fromkeys(result.say_machine() for result in results)
    busy = [result.others_busy_cores for result in results]
    is_quiet = statistics.median_high(busy) < 0.2
    warning = "" if is_quiet else ": compare latencies with each other; do not take them as absolute"
    return f"Machine: {'; '.join(machines)}. Other processes {say_busy(busy)} just before the runs{warning}."


def _say_origin(results: Sequence[Result]) -> str:
    dates = sorted(result.date for result in results)
    commits = sorted({result.commit or "none" for result in results})
    return f"{dates[0]} to {dates[-1]}, commit {', '.join(commits)}. This page: `{command_line()}`."


def _say_published(rows: Sequence[Row], published: Published) -> str:
    theirs = next(iter(published.values()))
    others = sorted({row.cell.model for row in rows} - {theirs.model})
    warning = f" **{' and '.join(others)} may be another network than {theirs.model}.**" if others else ""
    return (
        f"Published: {theirs.title} ([source]({_SOURCE})), another machine. Times as fast: their mean over ours."
        f"{warning}"
    )


def _reasons(rows: Sequence[Row]) -> str:
    """List below a table why some rounds have no numbers."""
    found = [f"- {row.title}: {words}\n" for row in rows for words in row.troubles]
    return "".join(["\n", *found]) if found else ""


def _wer(row: Row) -> str:
    return "-" if row.wer is None else f"{100 * row.wer:.1f}"


def _cpu(row: Row) -> str:
    return "-" if row.cpu_ms_per_clip is None else f"{row.cpu_ms_per_clip:.1f}"


def _show(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"
