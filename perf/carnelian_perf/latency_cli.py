"""Commands of `carnelian-perf` about latency and throughput: sweep, report, infer, mixed."""

import logging
from pathlib import Path
from typing import Annotated, Optional

import typer

from carnelian_perf.options import (
    DEMO_MANIFEST,
    ClipsManifest,
    OptionalPath,
    SpeechManifest,
    check_file,
    check_model_and_clips,
    check_words,
    counts_of,
    describe_clips,
    durations_of,
    raw_file_option,
    render_option,
    served_repository,
)

app = typer.Typer()


@app.command()
def sweep(
    grid: Annotated[
        Path, typer.Argument(help="YAML: models, protocols, durations, batches, loads; perf/grids/*.yaml.")
    ],
    out: Annotated[
        OptionalPath,
        typer.Option(help="Folder of the sweep; each cell has its own in it.", show_default="perf/results/NAME_sweep"),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure unstable and failed cells again.")] = False,
) -> None:
    """Measure latency and throughput over batch, duration and load with Triton's perf_analyzer.

    Cells that have a result are not measured again. The exit status is 1 if a cell failed.
    """
    from carnelian_perf.grid import read_grid
    from carnelian_perf.sweep import describe, run_grid

    check_file("GRID", grid)
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
        typer.Option(
            "--published-model", help="Whose published table is set beside ours: quartznet_15x5, jasper_10x5dr."
        ),
    ] = None,
    machine: Annotated[str, typer.Option("--published-machine", help="Part of the published machine's name.")] = "A100",
    precision: Annotated[str, typer.Option("--published-precision", help="fp16, tf32 or fp32.")] = "fp16",
    inference: Annotated[
        OptionalPath,
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
        check_file("--infer", inference)
    print("\n".join(f"wrote {path}" for path in write_report(sweep, published, inference)))


@app.command()
def infer(
    source: Annotated[
        OptionalPath,
        typer.Argument(help="A checkpoint, or a training YAML, whose network gets random weights."),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="a.b=value, over the YAML; repeatable."),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(help="Comma-separated: plain, eager, compiled, compiled_graphs, onnx_conv1d, onnx, onnx_int8."),
    ] = "plain,eager,onnx_conv1d,onnx",
    durations: Annotated[str, typer.Option(help="Lengths of clips in seconds, comma-separated.")] = "2,7,16.7",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16",
    steps: Annotated[int, typer.Option(help="Steps that are counted.", min=1)] = 20,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=0)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, tf32 (of GPUs), bf16, fp16.")] = "fp32",
    manifest: SpeechManifest = DEMO_MANIFEST,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--published-model",
            help="Whose published table is set beside ours: quartznet_15x5, jasper_10x5dr, wav2vec2_base_hourglass.",
        ),
    ] = None,
    machine: Annotated[str, typer.Option("--published-machine", help="Part of the published machine's name.")] = "A100",
    published_precision: Annotated[str, typer.Option(help="fp16, tf32 or fp32; bf16 of wav2vec 2.0.")] = "fp16",
    out: Annotated[OptionalPath, raw_file_option("NAME_infer.json", "Raw file; the table goes beside it.")] = None,
    render: Annotated[OptionalPath, render_option("the table")] = None,
) -> None:
    """Measure inference without a server, by batch and duration: PyTorch and ONNX Runtime in turns."""
    from carnelian_perf.published import choose
    from carnelian_perf.render_infer import render as render_table

    chosen = {"model": model, "hardware": machine, "precision": published_precision} if model else {}
    published = choose(**chosen) if chosen else {}
    if render is not None:
        check_file("--render", render)
    elif source is None:
        raise typer.BadParameter("a checkpoint or a training YAML must be named, or a raw file with --render")
    else:
        from carnelian_perf.infer_results import PRECISIONS, TITLES

        for option, path in (("SOURCE", source), ("--manifest", manifest)):
            check_file(option, path)
        check_words("--engines", engines.split(","), TITLES)
        check_words("--device", [device], ("cpu", "cuda"))
        check_words("--precision", [precision], PRECISIONS)
        durations_s, sizes = durations_of("--durations", durations), counts_of("--batches", batches)
        from carnelian_perf.infer import Plan, measure

        plan = Plan(
            source=source,
            manifest=manifest,
            engines=engines.split(","),
            durations_s=durations_s,
            batches=sizes,
            steps=steps,
            warm_up=warm_up,
            threads=threads,
            device=device,
            precision=precision,
            overrides=overrides or (),
        )
        measurement = measure(plan)
        measurement.facts["published"] = chosen
        render = out or Path("perf/results") / f"{measurement.facts['model']}_infer.json"
        measurement.write(render)
    page = render_table(render, published)
    print(f"{page.read_text()}\nwrote {page}")


@app.command()
def mixed(
    repository: Annotated[Path, typer.Option(help="The repository under test.")] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="The recogniser.")] = "quartznet_demo",
    checkpoint: Annotated[Path, typer.Option(help="What the model was exported from.")] = Path(
        "demo/quartznet_demo.pt"
    ),
    random_weights: Annotated[
        OptionalPath,
        typer.Option(help="A training YAML whose network is served with random weights, in place of the three above."),
    ] = None,
    manifest: ClipsManifest = None,
    target: Annotated[float, typer.Option(help="Limit for the 95th percentile, in milliseconds.", min=1)] = 500,
    seconds: Annotated[float, typer.Option(help="Seconds during which clips arrive in each run.", min=0.1)] = 10,
    steps: Annotated[int, typer.Option(help="Steps of the bisection of the rate.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Bisections of each system.", min=1)] = 1,
    out: Annotated[OptionalPath, raw_file_option("MODEL_mixed.json", "Raw file; page and plot go beside it.")] = None,
    render: Annotated[OptionalPath, render_option("page and plot")] = None,
) -> None:
    """Measure how many clips of mixed length a second are answered in time, in an open loop.

    Starts three servers on 127.0.0.1: as shipped, with buckets, and for clients that pad to multiples of 10 s.
    """
    from carnelian_perf import render_mixed

    if render is None:
        check_file("--checkpoint", checkpoint)
        with served_repository(repository, model, random_weights) as (repository, model):
            check_model_and_clips(repository, model, manifest)
            from carnelian_export.to_onnx import export_padded
            from carnelian_training.checkpoint import load_model

            from carnelian_perf.infer import load_network
            from carnelian_perf.mixed import Plan, measure
            from carnelian_perf.traffic import cut_clips, load_clips

            # A YAML's random weights are the same each time.
            network = (load_network(random_weights) if random_weights else load_model(checkpoint))[1]
            plan = Plan(
                repository=repository,
                model=model,
                padded=export_padded(network),
                clips=load_clips(manifest) if manifest else cut_clips(DEMO_MANIFEST),
                source=describe_clips(manifest),
                target_ms=target,
                seconds=seconds,
                steps=steps,
                rounds=rounds,
            )
            render = out or Path("perf/results") / f"{model}_mixed.json"
            for measurement in measure(plan):
                measurement.write(render)  # after each step, so that it is not lost if a later one fails
    check_file("--render", render)
    print("\n".join(f"wrote {path}" for path in render_mixed.render(render)))


@app.command()
def int8(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of Jasper or QuartzNet.")],
    clips: Annotated[Path, typer.Option("--int8-clips", help="Manifest to calibrate on.")],
    manifest: Annotated[Path, typer.Option(help="Manifest of other clips, to transcribe.")],
    out: Annotated[OptionalPath, raw_file_option("NAME_int8.json", "Raw file.")] = None,
) -> None:
    """Measure what int8 costs in accuracy: it and float32 on the same clips, with the interval of their difference."""
    from carnelian_perf.int8 import measure

    for option, path in (("CHECKPOINT", checkpoint), ("--int8-clips", clips), ("--manifest", manifest)):
        check_file(option, path)
    out = out or Path("perf/results") / f"{checkpoint.stem}_int8.json"
    found = measure(checkpoint, clips, manifest, out)
    print(f"WER {found['wer_fp32']:.2%} in float32, {found['wer_int8']:.2%} in int8")
    interval = f"{100 * found['difference_low']:.2f} to {100 * found['difference_high']:.2f}"
    print(f"difference {100 * found['difference']:.2f} points, 95 % interval {interval}")
    print(f"best label the same in {found['same_best']:.1%} of frames, its log-probability within")
    print(
        f"{found['best_distance']:.3f} in the mean; {found['times_as_fast']:.2f} times as fast in CPU time\nwrote {out}"
    )
