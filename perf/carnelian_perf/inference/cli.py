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
    PublishedModel,
    PublishedPrecision,
    SpeechManifest,
    check_checkpoint,
    check_words,
    choose_published,
    counts_of,
    durations_of,
    published_table,
    raw_file_option,
    raw_file_path,
)
from carnelian_perf.output import record
from carnelian_perf.subject import check_manifest

app = typer.Typer()


@app.command()
def infer(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, ours or another toolkit's, or a training YAML, whose network gets random weights.",
            callback=check_checkpoint,
        ),
    ],
    overrides: Overrides = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: plain, eager, graphs, compiled, compiled_graphs, onnx_conv1d, onnx, onnx_int8, "
            "tensorrt.",
            show_default="eager,onnx; of QuartzNet plain,eager,onnx_conv1d,onnx",
        ),
    ] = None,
    durations: Durations = "2,7,16.7",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16",
    steps: Annotated[int, typer.Option(help="Steps that are counted.", min=1)] = 20,
    warm_up: Annotated[int, typer.Option(help="Steps before them.", min=0)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1, max=MOST_THREADS)] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the network runs.")] = "cpu",
    precision: Annotated[Precision, typer.Option(help="tf32 is of GPUs alone.")] = "fp32",
    manifest: SpeechManifest = DEMO_MANIFEST,
    model: PublishedModel = None,
    published_machine: PublishedMachine = None,
    published_precision: PublishedPrecision = None,
    out: Annotated[Path | None, raw_file_option("NAME_infer.json", "Raw file; the table goes beside it.")] = None,
) -> None:
    """Measure inference without a server, by batch and duration: PyTorch, ONNX Runtime and TensorRT in turns.

    The exit status is 1 if no engine ran.
    """
    from carnelian_perf.inference.results import DEFAULTS, PLAIN, TITLES, Plan

    chosen = published_table(model, published_machine, published_precision)
    choose_published(chosen)  # refuses what is not there before anything is measured
    check_manifest(manifest)
    names = list(DEFAULTS) if engines is None else engines.split(",")
    check_words("--engines", names, TITLES)
    durations_s, sizes = durations_of(durations), counts_of("--batches", batches)
    from carnelian_training.models.quartznet import QuartzNet

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
    if engines is None and not isinstance(network, QuartzNet):
        plan = replace(plan, engines=[name for name in names if name not in PLAIN])
    raw = raw_file_path(out, f"{config.name}_infer.json")
    measured = record((replace(found, published=chosen) for found in measure(plan, config, network)), raw)
    if all(timing.not_run for timing in measured.timings):
        raise typer.Exit(1)
