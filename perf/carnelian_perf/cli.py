"""`carnelian-perf`: measurements, each with its raw file and what is rendered from it."""

import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

import typer

from carnelian_perf import latency_cli, server_cli, training_cli
from carnelian_perf.options import (
    DEMO_MANIFEST,
    ClipsManifest,
    OptionalPath,
    check_file,
    check_model_and_clips,
    describe_clips,
    numbers_of,
    raw_file_option,
    render_option,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.add_typer(latency_cli.app)
app.add_typer(server_cli.app)
app.add_typer(training_cli.app)


@app.callback()
def carnelian_perf() -> None:
    """Measurements of a Carnelian server, of inference without one, and of training."""


@app.command()
def batching(
    repository: Annotated[Path, typer.Option(help="The repository that the candidates are variants of.")] = Path(
        "model_repository"
    ),
    model: Annotated[str, typer.Option(help="The recogniser.")] = "quartznet_demo",
    checkpoint: Annotated[Path, typer.Option(help="What the model was exported from.")] = Path(
        "demo/quartznet_demo.pt"
    ),
    manifest: ClipsManifest = None,
    concurrency: Annotated[int, typer.Option(help="Clients that send at the same time.", min=1, max=64)] = 16,
    requests: Annotated[int, typer.Option(help="Requests in a run.", min=1, max=10_000)] = 128,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate and queue delay.", min=1, max=100)] = 5,
    out: Annotated[
        OptionalPath, raw_file_option("MODEL_batching.json", "Raw file; table and plot go beside it.")
    ] = None,
    render: Annotated[OptionalPath, render_option("table and plot")] = None,
) -> None:
    """Measure how batches form from clips of mixed length, for each candidate way.

    Starts a server on 127.0.0.1 for each candidate and queue delay, twelve in all, and takes them in turns. Each
    needs about 0.5 GB of memory for the demo model.
    """
    from carnelian_perf import render as rendering

    if render is not None:
        check_file("--render", render)
        _say_rendered(rendering.render(render))
        return
    check_file("--checkpoint", checkpoint)
    check_model_and_clips(repository, model, manifest)
    out = out or Path("perf/results") / f"{model}_batching.json"

    from carnelian_export.to_onnx import export_padded
    from carnelian_training.checkpoint import load_model

    from carnelian_perf.batching import Plan, measure
    from carnelian_perf.traffic import cut_clips, load_clips

    plan = Plan(
        repository=repository,
        model=model,
        padded=export_padded(load_model(checkpoint)[1]),
        clips=load_clips(manifest) if manifest else cut_clips(DEMO_MANIFEST),
        source=describe_clips(manifest),
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
def accuracy(
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines: audio_filepath, duration, text; source.")],
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "quartznet_demo",
    out: Annotated[
        OptionalPath,
        typer.Option(help="JSON lines to write, one for each clip, with its transcript as pred_text."),
    ] = None,
) -> None:
    """Transcribe a manifest with a running server; print WER and CER, by source where it names sources.

    A clip that fails is named on the standard error, counts as one in which nothing was heard, and makes the exit
    status 1.
    """
    from carnelian_perf.accuracy import CONCURRENCY, measure

    check_file("MANIFEST", manifest)
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
def decoding(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `carnelian-train fit` or `publish`.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines.")],
    language_model: Annotated[Path, typer.Option("--lm", help="ARPA or KenLM binary.")],
    lm_weights: Annotated[
        OptionalPath,
        typer.Option(help="Weights of the language model, from `carnelian-train weigh`."),
    ] = None,
    boosts: Annotated[str, typer.Option(help="Boosts of hot words to try, comma-separated.")] = "4,6,8,10",
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="host:port of a server of the model, whose decoding stage is measured too."),
    ] = None,
    out: Annotated[OptionalPath, raw_file_option("NAME_decoding.json", "Raw file.")] = None,
) -> None:
    """Measure decoders offline, in CPU seconds of one core: error rates, speed, hot words; pyctcdecode beside them."""
    _check_clips_and_models(checkpoint, manifest, {"--lm": language_model, "--lm-weights": lm_weights})
    tried = numbers_of("--boosts", boosts)
    from carnelian_training.checkpoint import load_model
    from carnelian_training.language_models.weights import read_weights

    from carnelian_perf.decoding import measure

    config, network = load_model(checkpoint)
    out = out or Path("perf/results") / f"{config.name}_decoding.json"
    weights = read_weights(lm_weights) if lm_weights else {}
    record = measure(config, network, manifest, language_model, weights, tried, url, out)
    for row in record["decoders"]:
        print(
            f"{row['decoder']:<12} WER {row['wer']:7.2%}  CER {row['cer']:7.2%}  {row['clips_per_s']:8.1f} clips/s per "
            f"core, real-time factor {row['real_time_factor']:.5f}"
        )
    greedy = record["greedy_batch"]
    print(f"greedy, {greedy['clips']} clips of {greedy['clip_s']} s: {greedy['median_cpu_ms']:.2f} ms of a core")
    if stage := record["greedy_stage"]:
        print(f"the same in Triton: {stage['stage_ms']:.2f} ms, {stage['compute_infer_ms']:.2f} of them computing")
    for row in record["hotwords"]:
        print(
            f"hot words, {row['decoder']}, boost {row['boost']:g}: F1 {row['f1']:.3f} "
            f"(precision {row['precision']:.2f}, recall {row['recall']:.2f}), "
            f"WER of the other words {row['wer_of_others']:.2%}"
        )
    print(f"wrote {out}")


@app.command()
def held_out(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `carnelian-train fit` or `publish`.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines, with speakers.")],
    language_model: Annotated[Path, typer.Option("--lm", help="ARPA or KenLM binary.")],
    neural_language_model: Annotated[
        OptionalPath,
        typer.Option("--neural-lm", help="Neural language model, ONNX."),
    ] = None,
    groups: Annotated[
        int, typer.Option(help="Groups of speakers; each is decoded with weights chosen on the others.", min=2)
    ] = 4,
    out: Annotated[OptionalPath, raw_file_option("NAME_held_out.json", "Raw file.")] = None,
) -> None:
    """Measure what language models are worth on clips that did not choose their weights, with intervals."""
    _check_clips_and_models(checkpoint, manifest, {"--lm": language_model, "--neural-lm": neural_language_model})
    from carnelian_training.checkpoint import load_model

    from carnelian_perf.held_out import measure

    config, network = load_model(checkpoint)
    out = out or Path("perf/results") / f"{config.name}_held_out.json"
    record = measure(config, network, manifest, language_model, neural_language_model, groups, out)
    for options in record["options"]:
        print(", ".join(f"{name} {value:g}" for name, value in options.items()))
    for name, wer in record["summary"]["wer"].items():
        print(f"{name:<20} WER {wer:7.2%} of {record['summary']['words']} words")
    for gain in record["summary"]["gains"]:
        print(
            f"{gain['from']} to {gain['to']}: {gain['difference']:+.2%}, "
            f"95 % interval {gain['low']:+.2%} to {gain['high']:+.2%}"
        )
    print(f"wrote {out}")


@app.command()
def words(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `carnelian-train fit` or `publish`.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines of 16 kHz clips that were not trained on.")],
    language_model: Annotated[Path, typer.Option("--lm", help="ARPA or KenLM binary.")],
    lm_weights: Annotated[
        OptionalPath,
        typer.Option(help="Weights of the language model, from `carnelian-train weigh`."),
    ] = None,
    calibration: Annotated[
        OptionalPath,
        typer.Option(help="Where to write the calibration, for `carnelian-export --calibration`."),
    ] = None,
    out: Annotated[OptionalPath, raw_file_option("NAME_words.json", "Raw file; the curve goes beside it.")] = None,
) -> None:
    """Compare times of words with PocketSphinx's alignment, and confidences with what was right; calibrate both."""
    _check_clips_and_models(checkpoint, manifest, {"--lm": language_model, "--lm-weights": lm_weights})
    from carnelian_training.checkpoint import load_model
    from carnelian_training.language_models.weights import read_weights

    from carnelian_perf.words import measure

    config, network = load_model(checkpoint)
    out = out or Path("perf/results") / f"{config.name}_words.json"
    weights = read_weights(lm_weights) if lm_weights else {}
    record = measure(config, network, manifest, language_model, weights, out, calibration)
    for row in record["decoders"]:
        print(
            f"{row['decoder']:<8} {'calibrated' if row['calibrated'] else 'as it is':<10}  start within "
            f"{row['start_error_ms']:.0f} ms, end within {row['end_error_ms']:.0f} ms "
            f"(medians, {row['timed_words']} words), "
            f"confidence off by {row['calibration_error']:.3f} (ECE, {row['words']} words)"
        )
    print(f"wrote {out}")


def main() -> None:
    """Run the command: exit status 0 done, 1 failed, 2 wrong use."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("carnelian_perf").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped on the way out
    try:
        app()
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is needed for this; install `carnelian-perf[batching,memory,sweep,training,words]`", error)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(str(error), error)


def _fail(message: str, cause: Exception) -> None:
    logging.getLogger("carnelian_perf").error("%s", message)
    raise SystemExit(1) from cause


def _check_clips_and_models(checkpoint: Path, manifest: Path, others: Mapping[str, Path | None]) -> None:
    """Refuse files that are not there, before anything heavy is imported."""
    for option, path in {"CHECKPOINT": checkpoint, "MANIFEST": manifest, **others}.items():
        if path is not None:
            check_file(option, path)


def _say_rendered(paths: tuple[Path, Path]) -> None:
    print("\n".join(f"wrote {path}" for path in paths))
