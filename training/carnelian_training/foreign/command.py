"""The commands of `carnelian-train` for other toolkits' checkpoints: `import`, `to-nemo` and `to-huggingface`."""

from pathlib import Path
from typing import Annotated

import typer

from carnelian_training.command_options import check_nemo_target, check_pt_target, folder


def import_(
    source: Annotated[
        Path, typer.Argument(help="A NeMo .nemo or .ckpt, DLE .pt or fairseq .pt file, or a Hugging Face folder.")
    ],
    target: Annotated[
        Path, typer.Argument(help="The checkpoint to write, for example quartznet_de.pt.", callback=check_pt_target)
    ],
    dle_config: Annotated[Path | None, typer.Option(help="DLE's YAML, if not one of its published models.")] = None,
    labels: Annotated[Path | None, typer.Option(help="fairseq: dict.ltr.txt, if not LibriSpeech's.")] = None,
    language: Annotated[str | None, typer.Option(help="Hugging Face: the one to read of several, such as eng.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="DLE: the weights as trained, not their average.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value, over the source's.")] = None,
) -> None:
    """Convert another toolkit's checkpoint into one of Carnelian, to evaluate, fine-tune or export it."""
    import torch

    from carnelian_training import checkpoint
    from carnelian_training.foreign.sources import read
    from carnelian_training.replacement import check_apart

    check_apart(target, source)
    name = target.stem
    config, weights = read(
        source,
        name,
        dle_config=dle_config,
        is_raw=raw,
        labels=labels,
        language=language,
        overrides=tuple(overrides or ()),
    )
    checkpoint.save(target, config, weights, results={"imported_from": source.name})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in checkpoint.build_network(config).parameters())
    kind = f"{len(config.labels)} labels" if config.pretraining is None else "pre-trained"
    typer.echo(f"{target}: {config.model.name}, {count:,} parameters, {kind}")


def to_nemo(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Ours.")],
    target: Annotated[Path, typer.Argument(help="The .nemo file to write.", callback=check_nemo_target)],
) -> None:
    """Write a checkpoint as a .nemo file for NVIDIA's NeMo."""
    from carnelian_training import checkpoint
    from carnelian_training.foreign import nemo
    from carnelian_training.replacement import check_apart

    check_apart(target, source)
    config, model = checkpoint.load_model(source)
    for difference in nemo.write(target, config, model.state_dict()):
        typer.echo(f"note: {difference}; log-probabilities will differ a little, most at a clip's ends")
    typer.echo(f"{target}: written")


def to_huggingface(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Ours, of wav2vec 2.0.")],
    target: Annotated[Path, typer.Argument(parser=folder, help="The folder to write.")],
) -> None:
    """Write a wav2vec 2.0 as a folder for Hugging Face's transformers."""
    from carnelian_training import checkpoint
    from carnelian_training.foreign import huggingface

    config, content = checkpoint.load(source)
    for difference in huggingface.write(target, config, content["weights"]):
        typer.echo(f"note: {difference}; log-probabilities of quiet clips will differ")
    typer.echo(f"{target}: written")
