"""The commands of `carnelian-train` for language models: `weigh`, `ngram` and `perplexity`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from carnelian_training.command_options import check_writable

TEXT_HELP = (
    "austen, web, wordnet, a text file, or a manifest for its transcripts; may be repeated. All packaged texts by "
    "default."
)
LABELS_HELP = 'The recogniser\'s labels, for text in another language than English: " abc...xyzäöüß".'


def weigh(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, ours or another toolkit's.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines; not those that results are reported on.")],
    target: Annotated[
        Path,
        typer.Option(
            "--out", help="JSON, for --lm-weights of `evaluate` and `carnelian-export`.", callback=check_writable
        ),
    ],
    language_model: Annotated[Path | None, typer.Option("--lm", help="n-grams, ARPA or KenLM binary.")] = None,
    neural_language_model: Annotated[Path | None, typer.Option("--neural-lm", help="Neural, ONNX.")] = None,
) -> None:
    """Choose the weights of language models on a dev set, for decoding."""
    if not (language_model or neural_language_model):
        raise typer.BadParameter("give the language models to weigh: --lm, --neural-lm or both")
    from carnelian_training.data.manifest import clips_to_evaluate, warn_of_characters
    from carnelian_training.distributed import find_device
    from carnelian_training.evaluation.evaluate import score_all
    from carnelian_training.evaluation.recogniser import load_recogniser
    from carnelian_training.language_models.weights import choose_weights, word_error_rates, write_weights
    from carnelian_training.replacement import check_apart

    check_apart(target, checkpoint, manifest, language_model, neural_language_model)
    config, network, decoder, _ = load_recogniser(checkpoint, language_model, neural_language_model)
    clips = clips_to_evaluate(manifest)
    warn_of_characters(clips, config.labels)
    if not any(set(word) <= set(config.labels) for clip in clips for word in clip.text.split()):
        raise ValueError(f"references must have words in the labels to choose weights, but {manifest} has none")
    log_probs, references = score_all(network.to(find_device()), config, clips, manifest), [clip.text for clip in clips]
    options = choose_weights(log_probs, references, decoder)
    rates = word_error_rates(log_probs, references, decoder, options)
    models = [path.name for path in (language_model, neural_language_model) if path]
    write_weights(target, options, {"model": config.name, "language_models": models, "clips": len(clips), "wer": rates})
    typer.echo("\n".join(f"{name:<20} {value:g}" for name, value in options.items()))
    typer.echo(f"on the {len(clips)} clips that they were chosen on, so lower than on others:")
    typer.echo("\n".join(f"WER {wer:7.2%}  {name}" for name, wer in rates.items()))


def ngram(
    target: Annotated[
        Path,
        typer.Argument(
            help="The KenLM binary to write, lm.klm; its report is lm.json beside it.", callback=check_writable
        ),
    ],
    text: Annotated[list[str] | None, typer.Option(help=TEXT_HELP)] = None,
    order: Annotated[int, typer.Option(help="Longest n-gram.", min=2, max=6)] = 3,
    prune: Annotated[
        str, typer.Option(help="Leave out n-grams seen at most this often, for 1, 2, ... words.")
    ] = "0,0,1",
    vocabulary: Annotated[int | None, typer.Option(help="Know the most frequent words only.", min=1)] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="A manifest whose sentences must not be in the text; repeatable.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help=LABELS_HELP)] = None,
) -> None:
    """Make an n-gram language model with KenLM, from text normalised like transcripts; print its perplexity."""
    from carnelian_training.language_models.ngram import build_ngram
    from carnelian_training.replacement import check_apart
    from carnelian_training.synthesis.texts import choose_sources

    counts = [int(count) if count.strip().isdecimal() else -1 for count in prune.split(",")]
    if min(counts) < 0 or counts != sorted(counts):
        raise typer.BadParameter(f"--prune must be counts that never fall, such as 0,0,1, but is {prune!r}")
    if len(counts) > max(order, 3):  # the default has 3
        raise typer.BadParameter(f"--prune must have at most one count for each of --order {order}, but is {prune!r}")
    if target.suffix != ".klm":  # so that no other model has a report of this one's name
        raise typer.BadParameter(f"the model's name must end in .klm, but is {target}; name it lm.klm")
    if labels is not None and " " not in labels:
        raise typer.BadParameter(f"the model is of words, so one label must be the space, but they are {labels!r:.200}")
    for written in (target, target.with_suffix(".json")):
        check_apart(written, *map(Path, text or []), *(exclude or []))
    sources = choose_sources(text or None)
    report = build_ngram(
        sources, target, order=order, prune=counts, vocabulary=vocabulary, exclude=exclude or (), labels=labels
    )
    typer.echo(
        f"{target}: {report.bytes:,} bytes, {report.vocabulary:,} words, from {report.sentences:,} sentences; "
        f"perplexity {report.perplexity:g} on {report.held_out_sentences:,} others, "
        f"{report.unknown_share:.2%} of their words unknown; left out: {report.refused:,} that cannot be written "
        f"in the labels, {report.excluded:,} of --exclude"
    )


def perplexity(
    models: Annotated[
        list[Path],
        typer.Argument(help="Checkpoints of language models; n-gram models, ARPA or KenLM binary."),
    ],
    text: Annotated[list[str] | None, typer.Option(help=TEXT_HELP)] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="As it was given to `ngram` and `fit`.")] = None,
    labels: Annotated[str | None, typer.Option(help=LABELS_HELP)] = None,
    whole: Annotated[bool, typer.Option(help="Rate every sentence, not only those that training keeps out.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON to write.", callback=check_writable)] = None,
) -> None:
    """Print perplexities of language models on the same sentences, which `ngram` and `fit` keep out of training.

    Perplexities are per word and sentence end: of all words, and of those that all models know, because an n-gram model
    has no probability for a word that it does not know. Several models are interpolated, too.
    """
    from carnelian_training.checkpoint import load_language_model
    from carnelian_training.distributed import find_device
    from carnelian_training.language_models.perplexity import interpolate, score_words, score_words_by_ngrams
    from carnelian_training.language_models.sentences import divide
    from carnelian_training.replacement import check_apart, write_text
    from carnelian_training.synthesis.texts import choose_sources

    if len({path.name for path in models}) < len(models):
        raise typer.BadParameter("the models' files must have different names, by which they are reported")
    if out is not None:
        check_apart(out, *models, *map(Path, text or []), *(exclude or []))
    sentences = divide(choose_sources(text or None), exclude or (), labels)
    chosen = [*sentences.used, *sentences.held_out] if whole else sentences.held_out
    scores = {}
    for path in models:
        if path.suffix == ".pt":
            config, network = load_language_model(path)
            scores[path.name] = score_words(network.to(find_device()), chosen, config.text.segment)
        else:
            scores[path.name] = score_words_by_ngrams(path, chosen)
    mean = interpolate(list(scores.values()))
    if len(models) > 1:
        scores["together"] = mean
    report: dict[str, Any] = {
        "sentences": len(chosen),
        "words": sum(len(sentence.split()) for sentence in chosen),
        "models": {},
    }
    typer.echo(f"{report['sentences']:,} sentences, {report['words']:,} words")
    typer.echo(f"{'all words':>10} {'known':>8} {'unknown':>8}")
    for name, found in scores.items():
        row = found.perplexity(), found.perplexity(mean.known), 1 - float(found.known.mean())
        report["models"][name] = dict(zip(("all_words", "known_words", "unknown_share"), row, strict=True))
        typer.echo(f"{row[0]:10.2f} {row[1]:8.2f} {row[2]:8.2%} {name}")
    if out is not None:
        write_text(out, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
