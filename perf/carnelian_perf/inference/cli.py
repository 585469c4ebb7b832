"""The command of `carnelian-perf` about latency without a server: infer."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from carnelian_perf.options import (
    DEMO_MANIFEST,
    MOST_THREADS,
    Durations,
    Overrides,
    Precision,
    PublishedMachine,
    SpeechManifest,
    check_file,
    check_input,
    check_render,
    check_words,
    counts_of,
    durations_of,
    published_table,
    raw_file_option,
    raw_file_path,
    render_option,
)
from carnelian_perf.output import show_page, write_each

app = typer.Typer()


@app.command()
def infer(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint, or a training YAML, whose network gets random weights.", callback=check_input
        ),
    ] = None,
    overrides: Overrides = None,
    engines: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain, eager, graphs, compiled, compiled_graphs, onnx_conv1d, onnx, onnx_int8, "
            "tensorrt."
        ),
    ] = "plain,eager,onnx_conv1d,onnx",
    durations: Durations = "2,7,16.7",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16",
    steps: Annotated[int, typer.Option(help="Steps that are counted.", min=1)] = 20,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=0)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1, max=MOST_THREADS)] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the network runs.")] = "cpu",
    precision: Annotated[Precision, typer.Option(help="tf32 is of GPUs alone.")] = "fp32",
    manifest: SpeechManifest = DEMO_MANIFEST,
    model: Annotated[
        str | None,
        typer.Option(
            "--published-model",
            help="Whose published table is set beside ours: quartznet_15x5, jasper_10x5dr, wav2vec2_base_hourglass.",
        ),
    ] = None,
    published_machine: PublishedMachine = None,
    published_precision: Annotated[
        str | None, typer.Option(help="fp16, tf32 or fp32; bf16 of wav2vec 2.0.", show_default="fp16")
    ] = None,
    out: Annotated[Path | None, raw_file_option("NAME_infer.json", "Raw file; the table goes beside it.")] = None,
    raw: Annotated[Path | None, render_option("the table")] = None,
) -> None:
    """Measure inference without a server, by batch and duration: PyTorch, ONNX Runtime and TensorRT in turns.

    The exit status of a measurement is 1 if no engine ran.
    """
    from carnelian_perf.inference.results import TITLES, Measurement, Plan, render_page
    from carnelian_perf.yardsticks.published import choose

    is_measured = raw is None
    chosen = published_table(model, published_machine, published_precision)
    if chosen:
        choose(**chosen)  # refuses what is not there before anything is measured
    if raw is not None:
        check_render(context, "--published-model", "--published-machine", "--published-precision")
    elif source is None:
        raise typer.BadParameter("a checkpoint or a training YAML must be named, or a raw file with --render")
    else:
        check_file("--manifest", manifest)
        names = engines.split(",")
        check_words("--engines", names, TITLES)
        durations_s, sizes = durations_of(durations), counts_of("--batches", batches)
        from carnelian_perf.inference.measure import check_device, measure
        from carnelian_perf.networks import is_untrained, load_network

        plan = Plan(
            source=str(source),
            random_weights=is_untrained(source),
            manifest=str(manifest),
            engines=names,
            durations_s=durations_s,
            batches=sizes,
            steps=steps,
            warm_up=warm_up,
            threads=threads,
            device=device,
            precision=precision,
            overrides=overrides or [],
        )
        check_device(plan)
        config, network = load_network(source, plan.overrides)
        raw = raw_file_path(out, f"{config.name}_infer.json")
        write_each((replace(measured, published=chosen) for measured in measure(plan, config, network)), raw)
    measurement = show_page(
        raw, Measurement, lambda found, name: render_page(replace(found, published=chosen or found.published), name)
    )
    if is_measured and all(timing.not_run for timing in measurement.timings):
        raise typer.Exit(1)
