"""The commands of `carnelian-train` that run a recogniser: `evaluate` and `transcribe`."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carnelian_training.command_options import check_writable, given_options

if TYPE_CHECKING:
    from carnelian_training.evaluation.error_rates import Evaluation

Decoder = Annotated[str | None, typer.Option("--decoder", help="greedy, beam, or ngram with a language model.")]
LanguageModel = Annotated[
    Path | None, typer.Option("--lm", help="n-gram language model, ARPA or KenLM binary; a server has its own.")
]
NeuralLanguageModel = Annotated[
    Path | None, typer.Option("--neural-lm", help="Neural language model, ONNX, to rescore with (rescore=true).")
]
LmWeights = Annotated[
    Path | None, typer.Option("--lm-weights", help="Weights of the language models, of `carnelian-train weigh`.")
]
DecoderOptions = Annotated[
    list[str] | None, typer.Option("--option", help="A decoder option, such as beam_width=50; repeatable.")
]
SERVED = "quartznet_demo"


def evaluate(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(help="A checkpoint, ours or another toolkit's, then NeMo JSON lines; with --url these alone."),
    ],
    url: Annotated[
        str | None, typer.Option(help="Evaluate a running server instead: host:port of its gRPC endpoint.")
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table", help="Compare all decoders on all manifests; with --url, the server with offline, too."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --url, the name of the served model.",
            show_default=f"{SERVED}; with --table, the checkpoint's name",
        ),
    ] = None,
    decoder: Decoder = None,
    language_model: LanguageModel = None,
    neural_language_model: NeuralLanguageModel = None,
    lm_weights: LmWeights = None,
    options: DecoderOptions = None,
    mistakes: Annotated[int, typer.Option(help="How many mistakes of each kind to list.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines to write, transcripts as `pred_text`.", callback=check_writable)
    ] = None,
) -> None:
    """Print WER and CER on a manifest, by source where the manifest names sources.

    `torchrun` divides the clips among processes, except with --table and --url. A clip that the server refuses is
    named, counts as an empty transcript, and makes the exit status 1.
    """
    from carnelian_training.replacement import check_apart

    _check_evaluation(given_options(context), paths, url, model)
    language_models = (language_model, neural_language_model, lm_weights)
    if out is not None:
        check_apart(out, *paths, *language_models)
    if table:
        _compare(paths, *language_models, url, model, out)
        return

    from carnelian_training.evaluation.error_rates import render, render_mistakes

    decoding = _read_decoding(decoder, options, language_model, neural_language_model)
    if url:
        from carnelian_training.evaluation.served import evaluate_served

        evaluation = evaluate_served(url, model or SERVED, paths[0], decoding)
    else:
        evaluation = _evaluate_checkpoint(paths[0], paths[1], *language_models, decoding)
    typer.echo(render(evaluation))
    if mistakes:
        typer.echo("\n" + render_mistakes(evaluation, mistakes))
    if out is not None:
        evaluation.write(out)
    for i, reason in evaluation.failures.items():
        logging.getLogger("carnelian-train").error("%s failed: %s", evaluation.clips[i].title, reason)
    if evaluation.failures:
        raise typer.Exit(1)


def transcribe(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, ours or another toolkit's.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines; their transcripts are not looked at.")],
    target: Annotated[
        Path,
        typer.Option("--out", help="The manifest to write, what was heard as `text`.", callback=check_writable),
    ],
    decoder: Decoder = None,
    language_model: LanguageModel = None,
    neural_language_model: NeuralLanguageModel = None,
    lm_weights: LmWeights = None,
    options: DecoderOptions = None,
    min_confidence: Annotated[float, typer.Option(help="Leave out clips below.", min=0, max=1)] = 0.0,
) -> None:
    """Transcribe clips without transcripts, to train on the result (pseudo-labels).

    Clips that cannot be read or have an empty transcript are left out. Each line has the model's `confidence`.
    `torchrun` divides the clips among processes.
    """
    from carnelian_training.data.manifest import write_manifest
    from carnelian_training.distributed import joined
    from carnelian_training.evaluation.pseudo_labels import transcribe as run
    from carnelian_training.evaluation.recogniser import load_recogniser
    from carnelian_training.replacement import check_apart

    check_apart(target, checkpoint, manifest, language_model, neural_language_model, lm_weights)
    decoding = _read_decoding(decoder, options, language_model, neural_language_model)
    config, network, text_decoder, usual = load_recogniser(
        checkpoint, language_model, neural_language_model, lm_weights
    )
    wanted = text_decoder.read_options(decoding, usual)
    with joined() as process:
        clips, skipped = run(network.to(process.device), config, manifest, process, text_decoder, wanted)
    if not process.leads:
        return
    heard = [clip for clip in clips if clip.text]
    kept = [clip for clip in heard if clip.extra["confidence"] >= min_confidence]
    write_manifest(target, kept)
    hours, silent = sum(clip.duration for clip in kept) / 3600, len(clips) - len(heard)
    # To stderr, for the manifest may go to standard output.
    typer.echo(
        f"wrote {target}: {len(kept)} of {len(clips) + skipped} clips, {hours:.2f} h; {skipped} could not be read, "
        f"nothing was heard in {silent}, {len(heard) - len(kept)} fell below --min-confidence",
        err=True,
    )
    if not kept:
        logging.getLogger("carnelian-train").warning("%s has no clips to train on", target)


def _check_evaluation(given: set[str], paths: list[Path], url: str | None, model: str | None) -> None:
    """Refuse arguments that do not go together."""
    if url == "":
        raise typer.BadParameter("--url must be host:port, but is empty")
    if "--model" in given and "--url" not in given:
        raise typer.BadParameter("--model must come with --url: it is the name of a served model")
    if model == "":
        raise typer.BadParameter("--model must be the name of a served model, but is empty")
    if given & {"--table", "--url"} and (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise typer.BadParameter(f"--table and --url must run in one process, not in {processes}: leave out `torchrun`")
    if "--table" in given:
        if given & {"--decoder", "--option", "--mistakes"}:
            raise typer.BadParameter(
                "--table must come without --decoder, --option and --mistakes: it has its own rows"
            )
        if len(paths) < 2:
            raise typer.BadParameter("give CHECKPOINT MANIFEST...")
        return
    if "--url" in given and given & {"--lm", "--neural-lm", "--lm-weights"}:
        raise typer.BadParameter(
            "--lm, --neural-lm and --lm-weights must not be given with --url: a server has what it was exported with"
        )
    expected = ["MANIFEST"] if url else ["CHECKPOINT", "MANIFEST"]
    if len(paths) != len(expected):
        raise typer.BadParameter(f"give {' '.join(expected)}, not {len(paths)} paths")


def _read_decoding(
    decoder: str | None, options: list[str] | None, language_model: Path | None, neural_language_model: Path | None
) -> dict[str, str]:
    """Collect the decoder's options, and check that each given language model is used."""
    from carnelian_training import ctc

    decoding = ctc.split_assignments([*(options or ()), *([f"decoder={decoder}"] if decoder else ())])
    if language_model and decoding.get("decoder") != "ngram":
        raise typer.BadParameter("--lm must come with --decoder ngram, or `evaluate --table`: no other decoder asks it")
    if neural_language_model and decoding.get("rescore", "").lower() != "true":
        raise typer.BadParameter("--neural-lm must come with --option rescore=true, or `evaluate --table`")
    return decoding


def _evaluate_checkpoint(
    checkpoint: Path,
    manifest: Path,
    language_model: Path | None,
    neural_language_model: Path | None,
    lm_weights: Path | None,
    decoding: dict[str, str],
) -> "Evaluation":
    """Transcribe a manifest with all processes; those that do not lead end here."""
    from carnelian_training.data.manifest import warn_of_characters
    from carnelian_training.distributed import joined
    from carnelian_training.evaluation.evaluate import evaluate as run
    from carnelian_training.evaluation.recogniser import load_recogniser

    config, network, decoder, usual = load_recogniser(checkpoint, language_model, neural_language_model, lm_weights)
    options = decoder.read_options(decoding, usual)
    with joined() as process:
        evaluation = run(network.to(process.device), config, manifest, process, decoder, options)
    if not process.leads:
        raise typer.Exit
    warn_of_characters(evaluation.clips, config.labels)
    return evaluation


def _compare(
    paths: list[Path],
    language_model: Path | None,
    neural_language_model: Path | None,
    lm_weights: Path | None,
    url: str | None,
    model: str | None,
    out: Path | None,
) -> None:
    """Compute, print and write the table of `evaluate --table`; `paths` are a checkpoint and manifests."""
    from carnelian_training.distributed import find_device
    from carnelian_training.evaluation.comparison import compare, render_comparison, write_comparison
    from carnelian_training.evaluation.recogniser import load_recogniser

    config, network, decoder, usual = load_recogniser(paths[0], language_model, neural_language_model, lm_weights)
    server = (url, model or config.name) if url else None
    rows = list(compare(network.to(find_device()), config, paths[1:], decoder, usual, server))
    typer.echo(render_comparison(rows))
    if out is not None:
        write_comparison(out, rows)
    if any(row.failed for row in rows):
        raise typer.Exit(1)
