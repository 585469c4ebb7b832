"""`carnelian-train`: fit a model, evaluate it, publish it, import one; prepare, check and synthesise corpora."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from carnelian_training.command_options import Overrides, check_pt_target, escape_output, folder, version_option
from carnelian_training.corpora.command import convert, perturb, prepare, validate
from carnelian_training.evaluation.command import evaluate, transcribe
from carnelian_training.foreign.command import import_, to_huggingface, to_nemo
from carnelian_training.language_models.command import ngram, perplexity, weigh
from carnelian_training.synthesis.command import surroundings, synthesise

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# The panels of --help, in this order.
MODELS, LANGUAGE_MODELS, DATA, TOOLKITS = "Models", "Language models", "Data", "Other toolkits' checkpoints"


@app.callback()
def carnelian_train(version: Annotated[bool, version_option("carnelian-training")] = False) -> None:
    """Hold the options that come before any command."""


@app.command(rich_help_panel=MODELS)
def fit(
    config: Annotated[Path, typer.Argument(help="A YAML file, for example training/configs/quartznet_15x5.yaml.")],
    directory: Annotated[
        Path, typer.Option("--out", parser=folder, help="Folder of the run; resumed if it holds checkpoints.")
    ],
    overrides: Overrides = None,
) -> None:
    """Train a model; run it again to go on with an interrupted run."""
    from carnelian_training.loop.train import train
    from carnelian_training.run_config import load_run

    train(load_run(config, tuple(overrides or ())), directory, config)


app.command(rich_help_panel=MODELS)(evaluate)
app.command(rich_help_panel=MODELS)(transcribe)


@app.command(rich_help_panel=MODELS)
def average(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoints of one network: of a run, or of several.")],
    target: Annotated[Path, typer.Option("--out", help="Where to write it: .pt.", callback=check_pt_target)],
) -> None:
    """Average the weights of checkpoints; the result often makes fewer errors than any of them."""
    from carnelian_training.checkpoint import average as run

    run(checkpoints, target)


@app.command(rich_help_panel=MODELS)
def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `fit`.")],
    target: Annotated[Path, typer.Argument(help="Where to write it: .pt.", callback=check_pt_target)],
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
    from carnelian_training.loop.plot import draw

    draw(metrics, target)


app.command(rich_help_panel=LANGUAGE_MODELS)(weigh)
app.command(rich_help_panel=LANGUAGE_MODELS)(ngram)
app.command(rich_help_panel=LANGUAGE_MODELS)(perplexity)
app.add_typer(prepare, name="prepare", rich_help_panel=DATA)
for command in (convert, validate, perturb, synthesise, surroundings):
    app.command(rich_help_panel=DATA)(command)
app.command("import", rich_help_panel=TOOLKITS)(import_)
app.command(rich_help_panel=TOOLKITS)(to_nemo)
app.command(rich_help_panel=TOOLKITS)(to_huggingface)


def main() -> None:
    """Run the command. The exit status is 0 for success, 1 for failure, 2 for a wrong command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # hides "generated new fontManager"
    escape_output()
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        from carnelian_training.ctc import OptionError  # of the decoder; loaded by then if it was raised

        typer.echo(f"carnelian-train: {str(error) or type(error).__name__}", err=True)
        raise SystemExit(2 if isinstance(error, OptionError) else 1) from error


if __name__ == "__main__":  # `torchrun -m carnelian_training.cli`
    main()
