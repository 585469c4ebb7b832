"""Commands of `carnelian-perf` about accuracy: accuracy, decoding, held-out, words, int8."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len

from carnelian_perf.options import (
    check_apart,
    check_checkpoint,
    check_input,
    check_writable,
    numbers_of,
    raw_file_option,
    raw_file_path,
)

app = typer.Typer()
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, ours or another toolkit's.", callback=check_checkpoint)]
Manifest = Annotated[
    Path,
    typer.Argument(help="NeMo JSON lines of clips that were not trained on.", callback=check_input),
]
LanguageModel = Annotated[Path, typer.Option("--lm", help="ARPA or KenLM binary.", callback=check_input)]
LmWeights = Annotated[
    Path | None,
    typer.Option(help="Weights of the language model, from `carnelian-train weigh`.", callback=check_input),
]


@app.command()
def accuracy(
    manifest: Annotated[
        Path,
        typer.Argument(help="NeMo JSON lines: audio_filepath, duration, text; source.", callback=check_input),
    ],
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "quartznet_demo",
    out: Annotated[
        Path | None,
        typer.Option(
            callback=check_writable, help="JSON lines to write, one for each clip, with its transcript as pred_text."
        ),
    ] = None,
) -> None:
    """Transcribe a manifest with a running server; print WER and CER, by source where it names sources.

    A clip that fails is named on the standard error, counts as one in which nothing was heard, and makes the exit
    status 1.
    """
    from carnelian_perf.accuracy.served import CONCURRENCY, measure

    check_apart(out, manifest)
    measured = measure(manifest, url, model)
    for source in [*measured.sources, None]:
        rates = measured.error_rates(source)
        counts = f"{rates.utterances:>6} clips {rates.words:>7} words"
        shares = f"WER {rates.wer:7.2%}  CER {rates.cer:7.2%}"
        if not rates.words:
            shares = f"WER {'-':>7}  CER {'-':>7}  {rates.insertions} words inserted"
        name = "all" if source is None else source or repr(source)
        print(f"{name}{' ' * (32 - cell_len(name))} {counts}  {shares}")
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
    checkpoint: Checkpoint,
    manifest: Manifest,
    language_model: LanguageModel,
    lm_weights: LmWeights = None,
    boosts: Annotated[str, typer.Option(help="Boosts of hot words to try, comma-separated.")] = "4,6,8,10",
    url: Annotated[
        str | None,
        typer.Option(help="host:port of a server of the model, whose decoding stage is measured too."),
    ] = None,
    out: Annotated[Path | None, raw_file_option("NAME_decoding.json", "Raw file.")] = None,
) -> None:
    """Measure decoders offline, in CPU seconds of one core: error rates, speed, hot words; pyctcdecode beside them."""
    check_apart(out, checkpoint, manifest, language_model, lm_weights)
    tried = [boost for boost in dict.fromkeys(numbers_of("--boosts", boosts)) if boost]  # 0 is tried anyway
    from carnelian_training.foreign.sources import load_model
    from carnelian_training.language_models.weights import read_weights

    from carnelian_perf.accuracy.decoders import measure

    config, network = load_model(checkpoint)
    out = raw_file_path(out, f"{config.name}_decoding.json")
    weights = read_weights(lm_weights, language_model)
    measured = measure(config, network, manifest, language_model, weights, tried, url)
    for row in measured.decoders:
        print(
            f"{row.decoder:<12} WER {row.wer:7.2%}  CER {row.cer:7.2%}  {row.clips_per_s:8.1f} clips/s per core, "
            f"real-time factor {row.real_time_factor:.5f}"
        )
    greedy = measured.greedy_batch
    print(f"greedy, {greedy.clips} clips of {greedy.clip_s} s: {greedy.median_cpu_ms:.2f} ms of a core")
    if stage := measured.greedy_stage:
        print(f"the same in Triton: {stage.stage_ms:.2f} ms, {stage.compute_infer_ms:.2f} of them computing")
    if not measured.rare_words:
        print("hot words: none were tried, since no word of the manifest is rare in the language model")
    for hot in measured.hotwords:
        print(
            f"hot words, {hot.decoder}, boost {hot.boost:g}: F1 {hot.f1:.3f} "
            f"(precision {hot.precision:.2f}, recall {hot.recall:.2f}), WER of the other words {hot.wer_of_others:.2%}"
        )
    measured.write(out)
    print(f"wrote {out}")


@app.command()
def held_out(
    checkpoint: Checkpoint,
    manifest: Annotated[
        Path,
        typer.Argument(help="NeMo JSON lines of clips that were not trained on, with speakers.", callback=check_input),
    ],
    language_model: LanguageModel,
    neural_language_model: Annotated[
        Path | None, typer.Option("--neural-lm", help="Neural language model, ONNX.", callback=check_input)
    ] = None,
    groups: Annotated[
        int,
        typer.Option(help="Groups of speakers; each is decoded with weights chosen on the others.", min=2),
    ] = 4,
    out: Annotated[Path | None, raw_file_option("NAME_held_out.json", "Raw file.")] = None,
) -> None:
    """Measure what language models are worth on clips that did not choose their weights, with intervals."""
    check_apart(out, checkpoint, manifest, language_model, neural_language_model)
    from carnelian_training.foreign.sources import load_model

    from carnelian_perf.accuracy.held_out import measure

    config, network = load_model(checkpoint)
    out = raw_file_path(out, f"{config.name}_held_out.json")
    measured = measure(config, network, manifest, language_model, neural_language_model, groups)
    for options in measured.options:
        print(", ".join(f"{name} {value:g}" for name, value in options.items()))
    for name, wer in measured.summary.wer.items():
        print(f"{name:<20} WER {wer:7.2%} of {measured.summary.words} words")
    for gain in measured.summary.gains:
        points, low, high = (f"{100 * share:+.2f}" for share in (gain.difference, gain.low, gain.high))
        print(f"{gain.before} to {gain.after}: {points} points, 95 % interval {low} to {high}")
    measured.write(out)
    print(f"wrote {out}")


@app.command()
def words(
    checkpoint: Checkpoint,
    manifest: Manifest,
    language_model: LanguageModel,
    lm_weights: LmWeights = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            callback=check_writable, help="Where to write the calibration, for `carnelian-export --calibration`."
        ),
    ] = None,
    out: Annotated[Path | None, raw_file_option("NAME_words.json", "Raw file; the curve goes beside it.")] = None,
) -> None:
    """Compare times of words with PocketSphinx's alignment, and confidences with what was right; calibrate both.

    PocketSphinx knows English alone.
    """
    for target in (out, calibration):
        check_apart(target, checkpoint, manifest, language_model, lm_weights)
    from carnelian_training.foreign.sources import load_model
    from carnelian_training.language_models.weights import read_weights

    from carnelian_perf.accuracy.words import draw, measure
    from carnelian_perf.whole_file import write_whole

    config, network = load_model(checkpoint)
    out = raw_file_path(out, f"{config.name}_words.json")
    check_apart(calibration, out, out.with_suffix(".png"))
    weights = read_weights(lm_weights, language_model)
    measured = measure(config, network, manifest, language_model, weights)
    for row in measured.decoders:
        print(
            f"{row.decoder:<8} {'calibrated' if row.calibrated else 'as it is':<10}  start within "
            f"{row.start_error_ms:.0f} ms, end within {row.end_error_ms:.0f} ms (medians, {row.timed_words} words), "
            f"confidence off by {row.calibration_error:.3f} (ECE, {row.words} words)"
        )
    measured.write(out)
    draw(measured.decoders, out.with_suffix(".png"))
    if calibration is not None:
        measured.calibration.check()
        write_whole(calibration, measured.calibration.to_json())
    print(f"wrote {out}")


@app.command()
def int8(
    checkpoint: Checkpoint,
    clips: Annotated[Path, typer.Option("--int8-clips", help="Manifest to calibrate on.", callback=check_input)],
    manifest: Annotated[Path, typer.Option(help="Manifest of other clips, to transcribe.", callback=check_input)],
    out: Annotated[Path | None, raw_file_option("NAME_int8.json", "Raw file.")] = None,
) -> None:
    """Measure what int8 costs in accuracy: it and float32 on the same clips, with the interval of their difference."""
    check_apart(out, checkpoint, clips, manifest)
    from carnelian_training.foreign.sources import load_model

    from carnelian_perf.accuracy.int8 import measure

    config, network = load_model(checkpoint)
    out = raw_file_path(out, f"{config.name}_int8.json")
    measured = measure(config, network, clips, manifest)
    found = measured.summary
    print(f"WER {found.wer_fp32:.2%} in float32, {found.wer_int8:.2%} in int8")
    interval = f"{100 * found.difference_low:.2f} to {100 * found.difference_high:.2f}"
    print(f"difference {100 * found.difference:.2f} points, 95 % interval {interval}")
    print(f"best label the same in {found.same_best:.1%} of frames, its log-probability within")
    print(f"{found.best_distance:.3f} in the mean; {found.times_as_fast:.2f} times as fast in CPU time")
    measured.write(out)
    print(f"wrote {out}")
