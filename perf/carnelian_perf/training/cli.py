"""Commands of `carnelian-perf` about training: loading, training, hourglass."""

from pathlib import Path
from typing import Annotated

import typer

from carnelian_perf.options import (
    MOST_THREADS,
    PRECISIONS,
    Overrides,
    check_input,
    check_words,
    counts_of,
    raw_file_option,
    raw_file_path,
)
from carnelian_perf.output import record

app = typer.Typer()


@app.command()
def loading(
    config: Annotated[
        Path,
        typer.Argument(
            help="A training YAML with `data.train`: training/configs/quartznet_15x5.yaml with "
            "--set 'data.train=[{path: m.jsonl}]', ...",
            callback=check_input,
        ),
    ],
    overrides: Overrides = None,
    batches: Annotated[int, typer.Option(help="Batches to read; more than steps.", min=2)] = 20,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=1)] = 2,
    out: Annotated[Path | None, raw_file_option("NAME_loading.json", "Raw file.")] = None,
) -> None:
    """Measure, in CPU seconds of one core, how much faster the batches of `data.train` are read than trained on."""
    if batches <= steps:
        raise typer.BadParameter(f"--batches must be above --steps, {steps}, but is {batches}")
    from carnelian_training.run_config import load_config

    from carnelian_perf.training.loading import measure

    settings = load_config(config, tuple(overrides or ()))
    out = raw_file_path(out, f"{settings.name}_loading.json")
    measured = measure(settings, batches, steps)
    read, trained = (part.audio_s_per_cpu_s for part in (measured.loading, measured.training))
    step = f"training in {measured.precision}"
    print(f"loading {read:.1f}, {step} {trained:.2f} seconds of audio per second of a core")
    print(f"loading is {read / trained:.0f} times as fast")
    measured.write(out)
    print(f"wrote {out}")


@app.command()
def training(
    config: Annotated[
        Path,
        typer.Argument(
            help="A training YAML: training/configs/quartznet_15x5.yaml, wav2vec2_base.yaml, ...", callback=check_input
        ),
    ],
    overrides: Overrides = None,
    batches: Annotated[str, typer.Option(help="Clips per process, comma-separated.")] = "4",
    precisions: Annotated[str, typer.Option(help="Comma-separated: fp32, tf32, bf16, fp16.")] = "fp32,tf32,bf16,fp16",
    processes: Annotated[str, typer.Option(help="How many processes; the batch of each stays (weak scaling).")] = "1",
    duration: Annotated[float, typer.Option(help="Seconds per clip.", min=0.5, max=60)] = 7.0,
    steps: Annotated[int, typer.Option(help="Counted steps of each cell.", min=1)] = 5,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=1)] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads of a single process.", min=1, max=MOST_THREADS)] = 1,
    out: Annotated[Path | None, raw_file_option("NAME_training.json", "Raw file; the table goes beside it.")] = None,
) -> None:
    """Measure training steps beside plain `Conv1d` in PyTorch eager, and set them beside the published rows.

    Cells that need a GPU, or more of them, say "not run" where there is none.
    """
    names = precisions.split(",")
    check_words("--precisions", names, PRECISIONS)
    sizes, counts = counts_of("--batches", batches), counts_of("--processes", processes)
    if threads > 1 and max(counts) > 1:
        raise typer.BadParameter("--threads must be 1 beside several --processes, which have one thread each")
    from carnelian_training.run_config import load_config

    from carnelian_perf.training.steps import grid, measure
    from carnelian_perf.training.steps_results import Work

    settings = load_config(config, tuple(overrides or ()))
    has_baseline = settings.model.name == "quartznet"
    cells = grid(sizes, names, counts, has_baseline=has_baseline)
    raw = raw_file_path(out, f"{settings.name}_training.json")
    work = Work(duration_s=duration, steps=steps, warm_up=warm_up, threads=threads)
    record(measure(settings, cells, work), raw)


@app.command()
def hourglass(
    config: Annotated[
        Path,
        typer.Argument(
            help="A training YAML of wav2vec 2.0: training/configs/wav2vec2_base.yaml, ...", callback=check_input
        ),
    ],
    overrides: Overrides = None,
    factors: Annotated[str, typer.Option(help="Frames pooled into one, comma-separated.")] = "2,3,4,5,6",
    batch: Annotated[int, typer.Option(help="Clips of a step.", min=1)] = 1,
    duration: Annotated[float, typer.Option(help="Seconds per clip.", min=0.5, max=60)] = 15.6,
    steps: Annotated[int, typer.Option(help="Counted steps of each form.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1, max=MOST_THREADS)] = 1,
    out: Annotated[Path | None, raw_file_option("NAME_hourglass.json", "Raw file; the table goes beside it.")] = None,
) -> None:
    """Measure what an Hourglass saves of a training step of wav2vec 2.0, beside the plain transformer."""
    if 1 in (wanted := counts_of("--factors", factors)):
        raise typer.BadParameter(f"--factors must be above 1, the plain transformer's own, but is {factors!r}")
    from carnelian_training.run_config import load_config

    from carnelian_perf.training.hourglass import measure
    from carnelian_perf.training.hourglass_results import Work

    settings = load_config(config, tuple(overrides or ()))
    raw = raw_file_path(out, f"{settings.name}_hourglass.json")
    record(measure(settings, wanted, Work(batch, duration, steps, threads)), raw)
