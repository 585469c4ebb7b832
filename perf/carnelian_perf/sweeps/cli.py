"""Commands of `carnelian-perf` that sweep a grid, and that make pages of any results: sweep, report."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from carnelian_perf.options import (
    PublishedMachine,
    PublishedModel,
    PublishedPrecision,
    check_file,
    check_input,
    choose_published,
    folder,
    published_table,
)
from carnelian_perf.output import show_page

app = typer.Typer()


@app.command()
def sweep(
    grid: Annotated[
        Path,
        typer.Argument(
            help="YAML: models, protocols, durations, batches, loads; perf/grids/*.yaml.", callback=check_input
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            help="Folder of the sweep; each cell has its own in it.",
            show_default="perf/results/NAME_sweep",
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure unstable and failed cells again.")] = False,
) -> None:
    """Measure latency and throughput over batch, duration and load with Triton's perf_analyzer.

    Cells that have a result are not measured again. The exit status is 1 if a cell failed.
    """
    from carnelian_perf.sweeps.grid import read_grid
    from carnelian_perf.sweeps.run import run_grid

    wanted = read_grid(grid)
    out = out or Path("perf/results") / f"{wanted.name}_sweep"
    results = run_grid(wanted, out, retry)
    counts = {status: sum(result.status == status for result in results) for status in ("stable", "unstable", "failed")}
    again = "" if counts["stable"] == len(results) else "; --retry measures unstable and failed cells again"
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; results in {out}{again}")
    for result in results:
        if result.status == "failed":
            logging.getLogger("carnelian_perf").error("%s %s", result.cell.name, result.describe())
    if counts["failed"]:
        raise typer.Exit(1)


@app.command()
def report(
    raw: Annotated[Path, typer.Argument(help="A raw file; of a sweep, its folder.")],
    model: PublishedModel = None,
    published_machine: PublishedMachine = None,
    published_precision: PublishedPrecision = None,
    inference: Annotated[
        list[str] | None,
        typer.Option(
            "--infer",
            metavar="[MODEL=]RAW",
            help="Raw file of `carnelian-perf infer`: what serving costs becomes a column. MODEL is the sweep's, where "
            "the file has another name for it; repeatable.",
        ),
    ] = None,
) -> None:
    """Measure nothing: make the page of a raw file, and its plot, beside it.

    Of a sweep, make tables, plots and one self-contained HTML page, beside its folder. A published table is set beside
    results of `sweep` and `infer`; --infer is for those of `sweep` alone.
    """
    chosen = published_table(model, published_machine, published_precision)
    if not raw.is_dir():
        if not raw.is_file():
            found = "a pipe or a device" if raw.exists() else "not there"
            raise typer.BadParameter(
                f"RAW must be a raw file or the folder of a sweep, as commands that measure write them, but {raw} is "
                f"{found}"
            )
        if raw.suffix != ".json":
            raise typer.BadParameter(
                "RAW must end in .json, for its page and plot go beside it and would overwrite a RAW in .md or .png, "
                f"but is {raw}; rename it"
            )
        if inference:
            raise typer.BadParameter(f"--infer must come with the folder of a sweep, but {raw} is a file; leave it out")
        show_page(raw, chosen)
        return
    published = choose_published(chosen)
    from carnelian_perf.sweeps.report import write_report

    raws = [_model_and_file(text) for text in inference or ()]
    print("\n".join(f"wrote {path}" for path in write_report(raw, published, raws)))


def _model_and_file(text: str) -> tuple[str | None, Path]:
    """Parse MODEL=RAW, or RAW alone, whose path may contain a `=`."""
    model, _, raw = text.partition("=")
    named = bool(raw) and not Path(text).is_file()
    path = Path(raw if named else text)
    check_file("--infer", path)
    return (model if named else None), path
