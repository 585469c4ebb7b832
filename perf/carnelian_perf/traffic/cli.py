"""Commands of `carnelian-perf` about clips of mixed length: batching, mixed."""

from pathlib import Path
from typing import Annotated

import typer

from carnelian_perf.options import (
    DEMO_CHECKPOINT,
    MOST_TARGET_MS,
    ClipsManifest,
    RandomWeights,
    Recogniser,
    Repository,
    check_file,
    raw_file_option,
    raw_file_path,
)
from carnelian_perf.output import record
from carnelian_perf.subject import check_model_and_clips, choose_clips, served_name, served_repository

app = typer.Typer()
Checkpoint = Annotated[Path, typer.Option(help="What the model was exported from, ours or another toolkit's.")]


@app.command()
def batching(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    checkpoint: Checkpoint = DEMO_CHECKPOINT,
    manifest: ClipsManifest = None,
    concurrency: Annotated[int, typer.Option(help="Clients that send at the same time.", min=1, max=64)] = 16,
    requests: Annotated[int, typer.Option(help="Requests in a run.", min=1, max=10_000)] = 128,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate and queue delay.", min=1, max=100)] = 5,
    out: Annotated[
        Path | None, raw_file_option("MODEL_batching.json", "Raw file; table and plot go beside it.")
    ] = None,
) -> None:
    """Measure how batches form from clips of mixed length, for each candidate way.

    Starts a server on 127.0.0.1 for each candidate and queue delay, twelve in all, and takes them in turns. Each
    needs about 0.5 GB of memory for the demo model.
    """
    check_file("--checkpoint", checkpoint)
    check_model_and_clips(repository, model, manifest)
    raw = raw_file_path(out, f"{model}_batching.json")

    from carnelian_training.foreign.sources import load_model

    from carnelian_perf.traffic.batching import Plan, measure
    from carnelian_perf.traffic.graph import build_padded

    clips, traffic = choose_clips(manifest)
    plan = Plan(
        repository=repository,
        model=model,
        padded=build_padded(*load_model(checkpoint)),
        clips=clips,
        traffic=traffic,
        concurrency=concurrency,
        num_requests=requests,
        rounds=rounds,
    )
    measured = record(measure(plan), raw)
    if measured.mismatches:
        raise ValueError(
            f"every candidate must give the same transcripts, but {len(measured.mismatches)} clips differ "
            f"(is {checkpoint} what {model} was exported from?): {measured.mismatches[0]}"
        )


@app.command()
def mixed(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    checkpoint: Checkpoint = DEMO_CHECKPOINT,
    random_weights: RandomWeights = None,
    manifest: ClipsManifest = None,
    target: Annotated[
        float, typer.Option(help="Limit for the 95th percentile, in milliseconds.", min=1, max=MOST_TARGET_MS)
    ] = 500,
    seconds: Annotated[
        float, typer.Option(help="Seconds during which clips arrive in each run.", min=0.1, max=86_400)
    ] = 10,
    steps: Annotated[int, typer.Option(help="Steps of the bisection of the rate.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Bisections of each system.", min=1)] = 1,
    out: Annotated[Path | None, raw_file_option("MODEL_mixed.json", "Raw file; page and plot go beside it.")] = None,
) -> None:
    """Measure how many clips of mixed length a second are answered in time, in an open loop.

    Starts three servers on 127.0.0.1: the repository as it is, one with buckets, and one for clients that pad to
    multiples of 10 s.
    """
    if random_weights is None:
        check_file("--checkpoint", checkpoint)
    raw = raw_file_path(out, f"{served_name(model, random_weights)}_mixed.json")
    with served_repository(repository, model, random_weights, manifest) as (served, name):
        from carnelian_training.foreign.sources import load_model

        from carnelian_perf.networks import load_network
        from carnelian_perf.traffic.graph import build_padded
        from carnelian_perf.traffic.mixed import Plan, measure

        # A YAML's random weights are the same each time.
        loaded = load_network(random_weights) if random_weights else load_model(checkpoint)
        clips, traffic = choose_clips(manifest)
        plan = Plan(
            repository=served,
            model=name,
            padded=build_padded(*loaded),
            clips=clips,
            traffic=traffic,
            target_ms=target,
            seconds=seconds,
            steps=steps,
            rounds=rounds,
        )
        record(measure(plan), raw)
