"""`carnelian-train`: fit a model, evaluate it, publish it, import one; prepare, check and synthesise corpora."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carnelian_training.corpora.command import convert, perturb, prepare, validate
from carnelian_training.foreign.command import import_, to_huggingface, to_nemo
from carnelian_training.synthesis.command import surroundings, synthesise

if TYPE_CHECKING:
    from carnelian_training import ctc
    from carnelian_training.config import Config
    from carnelian_training.models.network import CtcNetwork

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# The panels of --help, in this order.
MODELS, LANGUAGE_MODELS, DATA, TOOLKITS = "Models", "Language models", "Data", "Other toolkits' checkpoints"
TEXT_HELP = (
    "austen, web, wordnet, a text file, or a manifest for its transcripts; may be repeated. All packaged texts by "
    "default."
)
LABELS_HELP = 'The recogniser\'s labels, for text in another language than English: " abc...xyzäöüß".'


@app.command(rich_help_panel=MODELS)
def fit(
    config: Annotated[Path, typer.Argument(help="A YAML file, for example training/configs/quartznet_15x5.yaml.")],
    directory: Annotated[Path, typer.Option("--out", help="Folder of the run; resumed if it holds checkpoints.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the file; repeatable.")] = None,
) -> None:
    """Train a model; run it again to go on with an interrupted run."""
    from carnelian_training.run_config import load_run
    from carnelian_training.train import train

    train(load_run(config, tuple(overrides or ())), directory, config)


@app.command(rich_help_panel=MODELS)
def evaluate(
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
    model: Annotated[str, typer.Option(help="With --url, the name of the served model.")] = "quartznet_demo",
    decoder: Annotated[str | None, typer.Option(help="greedy, beam, or ngram with a language model.")] = None,
    language_model: Annotated[
        Path | None, typer.Option("--lm", help="n-gram language model, ARPA or KenLM binary; a server has its own.")
    ] = None,
    neural_language_model: Annotated[
        Path | None, typer.Option("--neural-lm", help="Neural language model, ONNX, to rescore with (rescore=true).")
    ] = None,
    lm_weights: Annotated[
        Path | None, typer.Option(help="Weights of the language models, of `carnelian-train weigh`.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="A decoder option, such as beam_width=50; repeatable.")
    ] = None,
    mistakes: Annotated[int, typer.Option(help="How many mistakes of each kind to list.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON lines to write, transcripts as `pred_text`.")] = None,
) -> None:
    """Print WER and CER on a manifest, by source where the manifest names sources.

    `torchrun` shares the clips out among processes. A clip that the server refuses is named, counts as one in which
    nothing was heard, and makes the exit status 1.
    """
    if table:
        if decoder or options or mistakes:
            raise typer.BadParameter(
                "--table must come without --decoder, --option and --mistakes: it has its own rows"
            )
        _compare(paths, url, model, language_model, neural_language_model, lm_weights, out)
        return
    expected = ["MANIFEST"] if url else ["CHECKPOINT", "MANIFEST"]
    if url and (language_model or neural_language_model or lm_weights):
        raise typer.BadParameter(
            "--lm, --neural-lm and --lm-weights must not be given with --url: a server has what it was exported with"
        )
    if len(paths) != len(expected):
        raise typer.BadParameter(f"give {' '.join(expected)}, not {len(paths)} paths")

    from carnelian_training import ctc
    from carnelian_training.distributed import joined
    from carnelian_training.evaluation_table import render, render_mistakes

    decoding = ctc.split_assignments(options or ()) | ({"decoder": decoder} if decoder else {})
    if language_model and decoding.get("decoder") != "ngram":
        raise typer.BadParameter("--lm must come with --decoder ngram, or with --table: no other decoder asks it")
    if neural_language_model and decoding.get("rescore", "").lower() != "true":
        raise typer.BadParameter("--neural-lm must come with --option rescore=true, or with --table")
    if url:
        from carnelian_training.served import evaluate_served

        evaluation = evaluate_served(url, model, paths[0], decoding)
    else:
        from carnelian_training.evaluate import evaluate as run
        from carnelian_training.evaluate import warn_of_characters
        from carnelian_training.language_models.weights import read_weights

        config, network, text_decoder = _load_recogniser(paths[0], language_model, neural_language_model)
        defaults = read_weights(lm_weights) if lm_weights else {}
        with joined() as process:
            evaluation = run(network.to(process.device), config, paths[1], process, text_decoder, decoding, defaults)
        if not process.leads:
            return
        warn_of_characters(evaluation.clips, config.labels)
    print(render(evaluation))
    if mistakes:
        print("\n" + render_mistakes(evaluation, mistakes))
    if out is not None:
        evaluation.write(out)
    for i, reason in evaluation.failures.items():
        logging.getLogger("carnelian-train").error("%s failed: %s", evaluation.clips[i].title, reason)
    if evaluation.failures:
        raise typer.Exit(1)


def _load_recogniser(
    path: Path, language_model: Path | None, neural_language_model: Path | None
) -> tuple["Config", "CtcNetwork", "ctc.Decoder"]:
    """A checkpoint, ours or another toolkit's, and a decoder of its labels."""
    from carnelian_training import ctc
    from carnelian_training.evaluate import frame_duration_s
    from carnelian_training.foreign.sources import load_model

    config, network = load_model(path)
    frame_s = frame_duration_s(config)
    return config, network, ctc.Decoder(config.labels, frame_s, language_model, None, neural_language_model)


def _compare(
    paths: list[Path],
    url: str | None,
    model: str,
    language_model: Path | None,
    neural_language_model: Path | None,
    lm_weights: Path | None,
    out: Path | None,
) -> None:
    """The table of `evaluate`."""
    if len(paths) < 2:
        raise typer.BadParameter("give CHECKPOINT MANIFEST...")

    from carnelian_training.comparison import compare, render_comparison, write_comparison
    from carnelian_training.language_models.weights import read_weights

    config, network, decoder = _load_recogniser(paths[0], language_model, neural_language_model)
    server = (url, model) if url else None
    rows = list(compare(network, config, paths[1:], decoder, read_weights(lm_weights) if lm_weights else {}, server))
    print(render_comparison(rows))
    if out is not None:
        write_comparison(out, rows)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


@app.command(rich_help_panel=LANGUAGE_MODELS)
def weigh(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, ours or another toolkit's.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines; not those that results are reported on.")],
    target: Annotated[Path, typer.Option("--out", help="JSON, for --lm-weights of `evaluate` and `carnelian-export`.")],
    language_model: Annotated[Path | None, typer.Option("--lm", help="n-grams, ARPA or KenLM binary.")] = None,
    neural_language_model: Annotated[Path | None, typer.Option("--neural-lm", help="Neural, ONNX.")] = None,
) -> None:
    """Choose the weights of language models on a dev set, for decoding."""
    if not (language_model or neural_language_model):
        raise typer.BadParameter("give the language models to weigh: --lm, --neural-lm or both")
    from carnelian_training.evaluate import clips_to_evaluate, score_all, warn_of_characters
    from carnelian_training.language_models.weights import choose_weights, word_error_rates, write_weights

    config, network, decoder = _load_recogniser(checkpoint, language_model, neural_language_model)
    clips = clips_to_evaluate(manifest)
    warn_of_characters(clips, config.labels)
    log_probs, references = score_all(network, config, clips), [clip.text for clip in clips]
    options = choose_weights(log_probs, references, decoder)
    rates = word_error_rates(log_probs, references, decoder, options)
    models = [path.name for path in (language_model, neural_language_model) if path]
    write_weights(target, options, {"model": config.name, "language_models": models, "clips": len(clips), "wer": rates})
    print("\n".join(f"{name:<20} {value:g}" for name, value in options.items()))
    print(f"on the {len(clips)} clips that they were chosen on, so lower than on others:")
    print("\n".join(f"WER {wer:7.2%}  {name}" for name, wer in rates.items()))


@app.command(rich_help_panel=LANGUAGE_MODELS)
def ngram(
    target: Annotated[Path, typer.Argument(help="The KenLM binary to write, lm.klm; its report is lm.json beside it.")],
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
    """Make an n-gram language model out of text, with KenLM, normalised as transcripts are; print its perplexity."""
    from carnelian_training.language_models.ngram import build_ngram
    from carnelian_training.synthesis.texts import choose_sources

    counts = [int(count) if count.strip().isdecimal() else -1 for count in prune.split(",")]
    if min(counts) < 0 or counts != sorted(counts):
        raise typer.BadParameter(f"--prune must be counts that never fall, such as 0,0,1, but is {prune!r}")
    if target.suffix == ".json":
        raise typer.BadParameter(f"the model must not be named as its report is, but is {target}; name it lm.klm")
    if target.resolve() in {path.resolve() for path in [*map(Path, text or []), *(exclude or [])]}:
        raise typer.BadParameter(
            f"the model must not take the place of what it is made of, but {target} is given twice"
        )
    sources = choose_sources(text or None)
    report = build_ngram(
        sources, target, order=order, prune=counts, vocabulary=vocabulary, exclude=exclude or (), labels=labels
    )
    print(
        f"{target}: {report.bytes:,} bytes, {report.vocabulary:,} words, from {report.sentences:,} sentences; "
        f"perplexity {report.perplexity:g} on {report.held_out_sentences:,} others, "
        f"{report.unknown_share:.2%} of their words unknown; left out: {report.refused:,} that cannot be written "
        f"in the labels, {report.excluded:,} of --exclude"
    )


@app.command(rich_help_panel=LANGUAGE_MODELS)
def perplexity(
    models: Annotated[
        list[Path],
        typer.Argument(help="Checkpoints of language models; n-gram models, ARPA or KenLM binary."),
    ],
    text: Annotated[list[str] | None, typer.Option(help=TEXT_HELP)] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="As it was given to `ngram` and `fit`.")] = None,
    labels: Annotated[str | None, typer.Option(help=LABELS_HELP)] = None,
    whole: Annotated[bool, typer.Option(help="Rate every sentence, not only those that training keeps out.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Print perplexities of language models on the same sentences, which `ngram` and `fit` keep out of training.

    Perplexities are per word and sentence end: of all words, and of those that all models know, because an n-gram model
    has no probability for a word that it does not know. Several models are interpolated, too.
    """
    from carnelian_training.checkpoint import load_language_model
    from carnelian_training.language_models.perplexity import interpolate, score_words, score_words_by_ngrams
    from carnelian_training.language_models.sentences import divide
    from carnelian_training.replacement import replaced
    from carnelian_training.synthesis.texts import choose_sources

    if len({path.name for path in models}) < len(models):
        raise typer.BadParameter("the models' files must have different names, by which they are reported")
    sentences = divide(choose_sources(text or None), exclude or (), labels)
    chosen = [*sentences.used, *sentences.held_out] if whole else sentences.held_out
    scores = {}
    for path in models:
        if path.suffix == ".pt":
            config, network = load_language_model(path)
            scores[path.name] = score_words(network, chosen, config.text.segment)
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
    print(f"{report['sentences']:,} sentences, {report['words']:,} words")
    print(f"{'all words':>10} {'known':>8} {'unknown':>8}")
    for name, found in scores.items():
        row = found.perplexity(), found.perplexity(mean.known), 1 - float(found.known.mean())
        report["models"][name] = dict(zip(("all_words", "known_words", "unknown_share"), row, strict=True))
        print(f"{row[0]:10.2f} {row[1]:8.2f} {row[2]:8.2%} {name}")
    if out is not None:
        with replaced(out) as partial:
            partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@app.command(rich_help_panel=MODELS)
def average(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoints of one network: of a run, or of several.")],
    target: Annotated[Path, typer.Option("--out", help="Where to write it.")],
) -> None:
    """Average the weights of checkpoints, which often hears better than any of them."""
    from carnelian_training.checkpoint import average as run

    run(checkpoints, target)


@app.command(rich_help_panel=MODELS)
def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `fit`.")],
    target: Annotated[Path, typer.Argument(help="Where to write it.")],
) -> None:
    """Strip a checkpoint of what only resuming needs and store its weights in float16."""
    from carnelian_training.checkpoint import publish as run

    run(checkpoint, target)


@app.command(rich_help_panel=MODELS)
def plot(
    metrics: Annotated[list[Path], typer.Argument(help="`metrics.jsonl` of a run, or of several to compare.")],
    target: Annotated[Path, typer.Argument(help="Where to draw: .svg, .png or .pdf.")],
) -> None:
    """Draw the curves of runs, finished or not: loss and evaluations."""
    from carnelian_training.plot import draw

    draw(metrics, target)


app.add_typer(prepare, name="prepare", rich_help_panel=DATA)
for command in (convert, validate, perturb, synthesise, surroundings):
    app.command(rich_help_panel=DATA)(command)
app.command("import", rich_help_panel=TOOLKITS)(import_)
app.command(rich_help_panel=TOOLKITS)(to_nemo)
app.command(rich_help_panel=TOOLKITS)(to_huggingface)


def main() -> None:
    """Run the command: exit status 0 done, 1 failed, 2 wrong use."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        logging.getLogger("carnelian-train").error("%s", error)
        raise SystemExit(1) from error


if __name__ == "__main__":  # `torchrun -m carnelian_training.cli`
    main()
