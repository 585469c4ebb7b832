"""`carnelian-train`: fit a model, evaluate it, publish it, synthesise a corpus and its surroundings."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from carnelian_training.corpora.command import convert, perturb, prepare, validate
from carnelian_training.foreign.command import import_, to_nemo
from carnelian_training.synthesis.command import surroundings, synthesise

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command()(synthesise)
app.command()(surroundings)
app.add_typer(prepare, name="prepare")
app.command()(convert)
app.command()(validate)
app.command()(perturb)
app.command("import")(import_)
app.command()(to_nemo)


@app.command()
def fit(
    config: Annotated[Path, typer.Argument(help="A YAML file, for example training/configs/quartznet_15x5.yaml.")],
    directory: Annotated[Path, typer.Option("--out", help="Folder of the run; resumed if it holds checkpoints.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the file; repeatable.")] = None,
) -> None:
    """Train a model."""
    from carnelian_training.config import load_config
    from carnelian_training.train import train

    train(load_config(config, tuple(overrides or ())), directory)


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `fit` or `publish`.")],
    manifest: Annotated[Path, typer.Argument(help="NeMo JSON lines.")],
) -> None:
    """Print WER and CER of a checkpoint on a manifest, by source where the manifest names sources."""
    from carnelian_training.checkpoint import load_model
    from carnelian_training.evaluate import evaluate as run

    config, model = load_model(checkpoint)
    evaluation = run(model, config, manifest)
    for source in [*evaluation.sources(), None]:
        rates = evaluation.error_rates(source)
        counts = f"{rates.clips:>6} clips {rates.words:>7} words"
        print(f"{source or 'all':<32} {counts}  WER {rates.wer:7.2%}  CER {rates.cer:7.2%}")


@app.command()
def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `fit`.")],
    target: Annotated[Path, typer.Argument(help="Where to write it.")],
) -> None:
    """Strip a checkpoint of what only resuming needs and store its weights in float16."""
    from carnelian_training.checkpoint import publish as run

    run(checkpoint, target)


@app.command()
def plot(
    metrics: Annotated[Path, typer.Argument(help="`metrics.jsonl` of a run.")],
    target: Annotated[Path, typer.Argument(help="Where to draw: .svg, .png or .pdf.")],
) -> None:
    """Draw loss and error rates of a run, finished or not."""
    from carnelian_training.plot import draw

    draw(metrics, target)


def main() -> None:
    """Run the command: exit status 0 done, 1 failed, 2 wrong use."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        logging.getLogger("carnelian-train").error("%s", error)
        raise SystemExit(1) from error
