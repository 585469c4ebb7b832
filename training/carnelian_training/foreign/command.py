"""The commands of `carnelian-train` that deal with other toolkits' checkpoints: `import` and `to-nemo`."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[Path, typer.Argument(help="A NeMo .nemo or DLE .pt file, Jasper or QuartzNet.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to write, for example quartznet_de.pt.")],
    dle_config: Annotated[Path | None, typer.Option(help="DLE's YAML, if not one of its published models.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="DLE: the weights as trained, not their average.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the source's.")] = None,
) -> None:
    """Make a checkpoint of ours from another toolkit's: to evaluate, fine-tune, export."""
    from carnelian_training import checkpoint
    from carnelian_training.foreign.sources import read

    name = target.stem
    config, weights = read(source, name, dle_config=dle_config, is_raw=raw, overrides=tuple(overrides or ()))
    checkpoint.save(target, config, weights, results={"imported_from": source.name})
    count = sum(tensor.numel() for key, tensor in weights.items() if key.endswith(("weight", "bias")))
    typer.echo(f"{target}: {config.model.name}, {count:,} parameters, {len(config.labels)} labels")


def to_nemo(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Ours.")],
    target: Annotated[Path, typer.Argument(help="The .nemo file to write.")],
) -> None:
    """Write a checkpoint as a .nemo file for NVIDIA's NeMo."""
    from carnelian_training import checkpoint
    from carnelian_training.foreign import nemo

    config, model = checkpoint.load_model(source)
    for difference in nemo.write(target, config, model.state_dict()):
        typer.echo(f"note: {difference}; log-probabilities will differ a little, most at a clip's ends")
    typer.echo(f"{target}: written")
