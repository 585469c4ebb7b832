"""`carnelian-perf`: measurements, each with its raw file and what is rendered from it."""

import logging
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

DEMO_MANIFEST = Path("demo/clips/manifest.jsonl")


@app.callback()
def carnelian_perf() -> None:
    """Measurements of a Carnelian server."""


@app.command()
def batching(
    repository: Annotated[Path, typer.Option(help="The repository whose candidates are built.")] = Path(
        "model_repository"
    ),
    model: Annotated[str, typer.Option(help="The recogniser.")] = "quartznet_demo",
    checkpoint: Annotated[Path, typer.Option(help="What the model was exported from.")] = Path(
        "demo/quartznet_demo.pt"
    ),
    manifest: Annotated[
        Optional[Path],  # noqa: UP045  typer reads the annotation at run time, on Python 3.10 too
        typer.Option(help="Clips to send whole.", show_default="the demo's, cut to log-normal durations"),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Clients.", min=1, max=64)] = 16,
    requests: Annotated[int, typer.Option(help="Requests in a run.", min=1, max=10_000)] = 128,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate and queue delay.", min=1, max=100)] = 5,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Raw file; table and plot go beside it.", show_default="perf/results/MODEL_batching.json"),
    ] = None,
    render: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Measure nothing: make table and plot of this raw file."),
    ] = None,
) -> None:
    """Measure how batches form from clips of mixed length, for each candidate way.

    Starts a server on 127.0.0.1 for each candidate and queue delay, twelve in all, and takes them in turns. Each
    needs about 0.5 GB of memory for the demo model.
    """
    from carnelian_perf import render as rendering

    if render is not None:
        _check_file("--render", render)
        _say_rendered(rendering.render(render))
        return
    for option, path in (("--checkpoint", checkpoint), ("--manifest", manifest or DEMO_MANIFEST)):
        _check_file(option, path)
    out = out or Path("perf/results") / f"{model}_batching.json"
    if out.suffix != ".json":
        raise typer.BadParameter(f"--out must end in .json, but is {out}")

    from carnelian_export.to_onnx import export_padded
    from carnelian_training.checkpoint import load_model

    from carnelian_perf.batching import Plan, measure
    from carnelian_perf.candidates import WrongModelError, check_model
    from carnelian_perf.traffic import cut_clips, load_clips

    try:
        check_model(repository, model)
    except WrongModelError as error:
        raise typer.BadParameter(str(error)) from error
    plan = Plan(
        repository=repository,
        model=model,
        padded=export_padded(load_model(checkpoint)[1]),
        clips=load_clips(manifest) if manifest else cut_clips(DEMO_MANIFEST),
        source=f"those of {manifest}" if manifest else f"{DEMO_MANIFEST}, joined and cut to log-normal durations",
        concurrency=concurrency,
        num_requests=requests,
        rounds=rounds,
    )
    for measurement in measure(plan):
        measurement.write(out)  # after each round, so that it is not lost if a later one fails
    _say_rendered(rendering.render(out))
    if measurement.mismatches:
        raise ValueError(
            f"every candidate must give the same transcripts, but {len(measurement.mismatches)} clips differ "
            f"(is {checkpoint} what {model} was exported from?): {measurement.mismatches[0]}"
        )


@app.command()
def sweep(
    grid: Annotated[
        Path, typer.Argument(help="YAML: models, protocols, durations, batches, loads; perf/grids/*.yaml.")
    ],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder; each cell gets one in it.", show_default="perf/results/NAME_sweep"),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure unstable and failed cells again.")] = False,
) -> None:
    """Measure latency and throughput over batch, duration and load with Triton's perf_analyzer.

    Cells that have a result are not measured again. The exit status is 1 if a cell failed.
    """
    from carnelian_perf.grid import read_grid
    from carnelian_perf.sweep import describe, run_grid

    _check_file("GRID", grid)
    wanted = read_grid(grid)
    out = out or Path("perf/results") / f"{wanted.name}_sweep"
    results = run_grid(wanted, out, retry)
    counts = {status: sum(result.status == status for result in results) for status in ("stable", "unstable", "failed")}
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items())}; results in {out}")
    for result in results:
        if result.status == "failed":
            logging.getLogger("carnelian_perf").error("%s %s", result.cell.name, describe(result))
    if counts["failed"]:
        raise typer.Exit(1)


@app.command()
def report(
    sweep: Annotated[Path, typer.Argument(help="The folder of a sweep.")],
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--published-model", help="Whose published table to set beside: quartznet_15x5, jasper_10x5dr."),
    ] = None,
    machine: Annotated[str, typer.Option("--published-machine", help="A part of the machine's name.")] = "A100",
    precision: Annotated[str, typer.Option("--published-precision", help="fp16, tf32 or fp32.")] = "fp16",
    inference: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--infer", help="Raw file of `carnelian-perf infer`: what serving costs becomes a column."),
    ] = None,
) -> None:
    """Make a sweep's tables, plots and one self-contained HTML page, beside its folder."""
    from carnelian_perf.published import choose
    from carnelian_perf.report import write_report

    if not sweep.is_dir():
        raise typer.BadParameter(f"SWEEP must be a folder, but {sweep} is not there; `carnelian-perf sweep` makes it")
    published = choose(model, machine, precision) if model else {}
    if inference is not None:
        _check_file("--infer", inference)
    print("\n".join(f"wrote {path}" for path in write_report(sweep, published, inference)))


@app.command()
def infer(
    source: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A checkpoint, or a training YAML, whose network gets random weights."),
    ] = None,
    engines: Annotated[
        str, typer.Option(help="Of plain, eager, compiled, compiled_graphs, onnx_conv1d, onnx.")
    ] = "plain,eager,onnx_conv1d,onnx",
    durations: Annotated[str, typer.Option(help="Seconds of each clip.")] = "2,7,16.7",
    batches: Annotated[str, typer.Option(help="Clips.")] = "1,2,4,8,16",
    steps: Annotated[int, typer.Option(help="Counted ones.", min=1)] = 20,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=0)] = 3,
    threads: Annotated[int, typer.Option(help="Of the CPU.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="Of PyTorch: fp32, bf16, fp16.")] = "fp32",
    manifest: Annotated[Path, typer.Option(help="Speech, cut to the durations.")] = DEMO_MANIFEST,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--published-model", help="Whose published table to set beside: quartznet_15x5, jasper_10x5dr."),
    ] = None,
    machine: Annotated[str, typer.Option("--published-machine", help="A part of the machine's name.")] = "A100",
    published_precision: Annotated[str, typer.Option(help="fp16, tf32 or fp32.")] = "fp16",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Raw file; the table goes beside it.", show_default="perf/results/NAME_infer.json"),
    ] = None,
    render: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Measure nothing: make the table of this raw file."),
    ] = None,
) -> None:
    """Measure inference without a server, by batch and duration: PyTorch and ONNX Runtime in turns."""
    from carnelian_perf.published import choose
    from carnelian_perf.render_infer import render as render_table

    published = choose(model, machine, published_precision) if model else {}
    if render is not None:
        _check_file("--render", render)
    elif source is None:
        raise typer.BadParameter("a checkpoint or a training YAML must be named, or a raw file with --render")
    else:
        from carnelian_perf.engines import TITLES
        from carnelian_perf.infer import Plan, measure
        from carnelian_perf.infer_results import write

        for option, path in (("SOURCE", source), ("--manifest", manifest)):
            _check_file(option, path)
        _check_words("--engines", engines.split(","), TITLES)
        _check_words("--device", [device], ("cpu", "cuda"))
        _check_words("--precision", [precision], ("fp32", "bf16", "fp16"))
        plan = Plan(
            source=source,
            manifest=manifest,
            engines=engines.split(","),
            durations_s=_durations("--durations", durations),
            batches=_counts("--batches", batches),
            steps=steps,
            warm_up=warm_up,
            threads=threads,
            device=device,
            precision=precision,
        )
        measurement = measure(plan)
        render = out or Path("perf/results") / f"{measurement.facts['model']}_infer.json"
        write(measurement, render)
    page = render_table(render, published)
    print(f"{page.read_text()}\nwrote {page}")


@app.command()
def accuracy(
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines: audio_filepath, duration, text; source.")],
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "quartznet_demo",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON lines to write, one for each clip, with its transcript as pred_text."),
    ] = None,
) -> None:
    """Transcribe a manifest with a running server; print WER and CER, by source where it names sources.

    A clip that fails is named on the standard error, counts as one in which nothing was heard, and makes the exit
    status 1.
    """
    from carnelian_perf.accuracy import CONCURRENCY, measure

    _check_file("MANIFEST", manifest)
    measured = measure(manifest, url, model)
    for source in [*measured.sources, None]:
        rates = measured.error_rates(source)
        counts = f"{rates.utterances:>6} clips {rates.words:>7} words"
        print(f"{source or 'all':<32} {counts}  WER {rates.wer:7.2%}  CER {rates.cer:7.2%}")
    speed = measured.transcribed_s / measured.wall_s
    print(
        f"{measured.transcribed_s:.1f} s of audio in {measured.wall_s:.1f} s: {speed:.1f} audio seconds per second, "
        f"{CONCURRENCY} requests at a time"
    )
    if out is not None:
        measured.write(out)
        print(f"wrote {out}")
    for error in measured.failures:
        logging.getLogger("carnelian_perf").error("failed: %s", error)
    if measured.failures:
        raise typer.Exit(1)


@app.command()
def loading(
    config: Annotated[Path, typer.Argument(help="A training YAML with `data.train`.")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="a.b=value, over the file; repeatable."),
    ] = None,
    batches: Annotated[int, typer.Option(help="To read.")] = 20,
    steps: Annotated[int, typer.Option(help="To train.")] = 2,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Raw file.", show_default="perf/results/NAME_loading.json"),
    ] = None,
) -> None:
    """Measure, in CPU seconds of one core, how much faster batches are read than trained on."""
    from carnelian_training.config import load_config

    from carnelian_perf.loading import measure

    settings = load_config(config, tuple(overrides or ()))
    out = out or Path("perf/results") / f"{settings.name}_loading.json"
    reading, training = measure(settings, batches, steps, out)
    print(f"loading {reading.rate:.1f}, training {training.rate:.2f} seconds of audio per second of a core")
    print(f"loading is {reading.rate / training.rate:.0f} times as fast\nwrote {out}")


@app.command()
def training(
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A training YAML: training/configs/quartznet_15x5.yaml."),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="a.b=value, over the file; repeatable."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Clips per process, comma-separated.")] = "4",
    precisions: Annotated[str, typer.Option(help="Of fp32, tf32, bf16, fp16.")] = "fp32,tf32,bf16,fp16",
    processes: Annotated[str, typer.Option(help="How many processes; the batch of each stays (weak scaling).")] = "1",
    duration: Annotated[float, typer.Option(help="Seconds per clip.", min=0.5, max=60)] = 7.0,
    steps: Annotated[int, typer.Option(help="Counted steps of each cell.", min=1)] = 5,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=1)] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads of a single process.", min=1)] = 1,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Raw file; the table goes beside it.", show_default="perf/results/NAME_training.json"),
    ] = None,
    render: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Measure nothing: make the table of this raw file."),
    ] = None,
) -> None:
    """Measure training steps beside plain `Conv1d` in PyTorch eager, and set them beside the published rows.

    Cells that need a GPU, or more of them, say "not run" where there is none.
    """
    from carnelian_perf.render_training import render as render_table

    if render is not None:
        _check_file("--render", render)
    elif config is None:
        raise typer.BadParameter("a training YAML must be named, or a raw file with --render")
    else:
        from carnelian_training.config import load_config

        from carnelian_perf.training import PRECISIONS, Work, grid, run

        names = precisions.split(",")
        if not set(names) <= set(PRECISIONS):
            raise typer.BadParameter(f"--precisions must be of {', '.join(PRECISIONS)}, but are {precisions!r}")
        cells = grid(_counts("--batches", batches), names, _counts("--processes", processes))
        settings = load_config(config, tuple(overrides or ()))
        render = out or Path("perf/results") / f"{settings.name}_training.json"
        run(settings, cells, Work(duration_s=duration, steps=steps, warm_up=warm_up, threads=threads), render)
    page = render_table(render)
    print(f"{page.read_text()}\nwrote {page}")


def main() -> None:
    """Run the command: exit status 0 done, 1 failed, 2 wrong use."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("carnelian_perf").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped on the way out
    try:
        app()
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is needed for this; install `carnelian-perf[batching,training]`", error)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(str(error), error)


def _fail(message: str, cause: Exception) -> None:
    logging.getLogger("carnelian-perf").error("%s", message)
    raise SystemExit(1) from cause


def _counts(option: str, text: str) -> list[int]:
    counts = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if min(counts) < 1:
        raise typer.BadParameter(f"{option} must be positive numbers with commas between them, but is {text!r}")
    return counts


def _durations(option: str, text: str) -> list[float]:
    try:
        durations = [float(word) for word in text.split(",")]
    except ValueError:
        durations = []
    if not durations or not 0 < min(durations) <= max(durations) <= 60:
        raise typer.BadParameter(f"{option} must be seconds within 0 and 60, with commas between, but is {text!r}")
    return durations


def _check_words(option: str, words: Iterable[str], known: Iterable[str]) -> None:
    if wrong := set(words) - set(known):
        raise typer.BadParameter(f"{option} must be of {', '.join(known)}, but has {', '.join(sorted(wrong))}")


def _check_file(option: str, path: Path) -> None:
    if not path.is_file():
        raise typer.BadParameter(f"{option} must be a file, but {path} is not there")


def _say_rendered(paths: tuple[Path, Path]) -> None:
    print("\n".join(f"wrote {path}" for path in paths))
