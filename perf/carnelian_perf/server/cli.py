"""Commands of `carnelian-perf` about a server on this machine: tune, overhead, first-request, memory."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from carnelian_perf.options import (
    DEMO_MANIFEST,
    MOST_TARGET_MS,
    ClipsManifest,
    Durations,
    FileFormat,
    RandomWeights,
    Recogniser,
    Repository,
    SpeechManifest,
    check_apart,
    check_writable,
    default_target,
    durations_of,
    raw_file_option,
    raw_file_path,
)
from carnelian_perf.output import record, show_page, write_each
from carnelian_perf.subject import check_model_and_clips, choose_clips, served_name, served_repository

app = typer.Typer()


@app.command()
def tune(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    random_weights: RandomWeights = None,
    manifest: ClipsManifest = None,
    objective: Annotated[
        Literal["throughput", "latency"], typer.Option(help="Within --target, or of one request at a time.")
    ] = "throughput",
    target: Annotated[
        float,
        typer.Option(help="Limit for the 95th percentile in milliseconds, for throughput.", min=1, max=MOST_TARGET_MS),
    ] = 500,
    concurrency: Annotated[int, typer.Option(help="Clients at the same time, for throughput.", min=1, max=64)] = 16,
    requests: Annotated[int, typer.Option(help="Requests in a run.", min=1)] = 96,
    rounds: Annotated[int, typer.Option(help="Rounds in each step.", min=1)] = 3,
    write: Annotated[
        Path | None,
        typer.Option(
            callback=check_writable,
            help="Where to write the result, for `carnelian-export --tuning`.",
            show_default="beside the raw file, NAME_tuning.json",
        ),
    ] = None,
    out: Annotated[
        Path | None, raw_file_option("MODEL_tune_OBJECTIVE.json", "Raw file; the table goes beside it.")
    ] = None,
) -> None:
    """Find the instances, threads and batching of a model's stages that fit this machine, by measuring.

    Starts servers on 127.0.0.1, up to seven at a time, each on a copy of the model with other settings.
    """
    from carnelian_export.tuning import StageTuning, write_tuning
    from carnelian_serving.backends.threads import count_cores

    from carnelian_perf.server.tune import Plan, list_knobs, measure

    raw = raw_file_path(out, f"{served_name(model, random_weights)}_tune_{objective}.json")
    write = write or default_target("--write", raw.with_name(f"{raw.stem}_tuning.json"))
    check_apart(write, raw, raw.with_suffix(".md"))
    with served_repository(repository, model, random_weights, manifest) as (served, name):
        clips, traffic = choose_clips(manifest)
        plan = Plan(
            repository=served,
            model=name,
            clips=clips,
            traffic=traffic,
            objective=objective,
            target_ms=target,
            concurrency=1 if objective == "latency" else concurrency,
            num_requests=requests,
            rounds=rounds,
            knobs=list_knobs(objective, count_cores()),
        )
        measured = write_each(measure(plan), raw)
    assert measured.winner is not None  # the last step confirms one
    # Before the page: a full disk or a closed standard output must not cost the result.
    write_tuning(write, {stage: StageTuning(**values) for stage, values in measured.winner.items()})  # type: ignore[arg-type]
    show_page(raw)
    print(f"wrote {write}; carnelian-export --tuning {write} exports with it")


@app.command()
def overhead(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    random_weights: RandomWeights = None,
    manifest: SpeechManifest = DEMO_MANIFEST,
    durations: Durations = "2,16.7",
    file_format: FileFormat = "flac",
    clips: Annotated[
        int, typer.Option(help="Clips in each turn, a multiple of --batch, at least --clients.", min=1)
    ] = 32,
    rounds: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
    clients: Annotated[int, typer.Option(help="Clients that send single clips at the same time.", min=1, max=64)] = 16,
    batch: Annotated[int, typer.Option(help="Size of the ready-made batches that they are compared with.", min=1)] = 8,
    out: Annotated[Path | None, raw_file_option("MODEL_overhead.json", "Raw file; the table goes beside it.")] = None,
) -> None:
    """Measure what serving costs beside the acoustic model alone, and single clips beside ready-made batches."""
    from carnelian_perf.raw_file import Speech
    from carnelian_perf.repository import read_config
    from carnelian_perf.server.overhead import Plan, measure

    durations_s = durations_of(durations)
    if clips % batch:
        raise typer.BadParameter(f"--clips must be a multiple of --batch, {batch}, but is {clips}")
    if clips < clients:
        raise typer.BadParameter(f"--clips must be one for each of --clients, {clients}, at least, but is {clips}")
    raw = raw_file_path(out, f"{served_name(model, random_weights)}_overhead.json")
    with served_repository(repository, model, random_weights, manifest) as (served, name):
        if batch > (most := read_config(served / f"{name}_pcm").max_batch_size):
            raise typer.BadParameter(f"--batch must be at most {most}, what the model takes, but is {batch}")
        plan = Plan(
            repository=served,
            model=name,
            speech=Speech(manifest=str(manifest), format=file_format, clips=clips),
            durations_s=durations_s,
            rounds=rounds,
            clients=clients,
            batch=batch,
        )
        record(measure(plan), raw)


@app.command()
def first_request(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    random_weights: RandomWeights = None,
    manifest: SpeechManifest = DEMO_MANIFEST,
    durations: Durations = "2,7,16.7",
    file_format: FileFormat = "flac",
    rounds: Annotated[int, typer.Option(help="Servers for each duration.", min=1)] = 5,
    requests: Annotated[int, typer.Option(help="Requests to each server, one after another.", min=4)] = 100,
    out: Annotated[
        Path | None, raw_file_option("MODEL_first_request.json", "Raw file; the table goes beside it.")
    ] = None,
) -> None:
    """Measure whether the first request to a fresh server is as fast as later ones, as a whole and stage by stage.

    Starts a server on 127.0.0.1 for each duration and round, one after the other.
    """
    from carnelian_perf.raw_file import Speech
    from carnelian_perf.server.first_request import DISTINCT_CLIPS, Plan, measure

    durations_s = durations_of(durations)
    raw = raw_file_path(out, f"{served_name(model, random_weights)}_first_request.json")
    with served_repository(repository, model, random_weights, manifest) as (served, name):
        plan = Plan(
            repository=served,
            model=name,
            speech=Speech(manifest=str(manifest), format=file_format, clips=DISTINCT_CLIPS),
            durations_s=durations_s,
            rounds=rounds,
            num_requests=requests,
        )
        record(measure(plan), raw)


@app.command()
def memory(
    repository: Repository = Path("model_repository"),
    model: Recogniser = "quartznet_demo",
    manifest: ClipsManifest = None,
    requests: Annotated[int, typer.Option(help="Clips to send.", min=2)] = 10_000,
    every: Annotated[int, typer.Option(help="Requests between two looks at the processes.", min=1)] = 250,
    concurrency: Annotated[int, typer.Option(help="Clients that send at the same time.", min=1, max=64)] = 8,
    out: Annotated[Path | None, raw_file_option("MODEL_memory.json", "Raw file; page and plot go beside it.")] = None,
) -> None:
    """Measure the memory of a server's processes, at rest and over many requests, and whether it grows.

    The exit status is 1 if it does.
    """
    check_model_and_clips(repository, model, manifest)
    from carnelian_perf.server.memory import Plan, measure
    from carnelian_perf.server.memory_results import trend_of

    if requests < 5 * every:
        raise typer.BadParameter(f"--every must be at most a fifth of --requests, {requests}, but is {every}")
    clips, traffic = choose_clips(manifest)
    plan = Plan(
        repository=repository,
        model=model,
        clips=clips,
        traffic=traffic,
        num_requests=requests,
        every=every,
        concurrency=concurrency,
    )
    raw = raw_file_path(out, f"{model}_memory.json")
    measured = record(measure(plan), raw)
    trend = trend_of(measured)
    print(f"memory: {trend.verdict}, {trend.slope:.0f} bytes a request ({trend.low:.0f} to {trend.high:.0f})")
    if trend.verdict == "grows":
        raise typer.Exit(1)
