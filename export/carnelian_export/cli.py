"""`carnelian-export`: a checkpoint into a Triton model repository."""

import logging
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(help="A checkpoint of ours, a .nemo, a .pt of DLE or fairseq, or a Hugging Face folder."),
    ],
    name: Annotated[str, typer.Option(help="The model's public name, for example quartznet_15x5.")],
    repository: Annotated[Path, typer.Option(help="The folder that tritonserver loads.")],
    model_format: Annotated[str, typer.Option("--format", help="onnx")] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32")] = "fp32",
    language_model: Annotated[
        Path | None, typer.Option("--lm", help="n-gram language model, ARPA or KenLM binary; deployed with the model.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="Default of the decoder, such as decoder=ngram; repeatable.")
    ] = None,
) -> None:
    """Write a model's folders into a Triton repository, once the exported graph agrees with PyTorch."""
    _check_supported("--format", model_format, "onnx")
    _check_supported("--precision", precision, "fp32")

    from carnelian_training.ctc import split_assignments
    from carnelian_training.foreign.sources import load_model

    from carnelian_export.repository import Decoding, write_model

    decoding = Decoding(language_model, split_assignments(options or ()))
    config, network = load_model(source, name)
    difference = write_model(repository, name, config, network, decoding)
    print(f"{name} and {name}_pcm are in {repository}; log-probabilities within {difference:.1e} of PyTorch's")


def _check_supported(option: str, value: str, supported: str) -> None:
    if value != supported:
        raise typer.BadParameter(f"{option} must be {supported}, the only one there is yet, but is {value}")


def main() -> None:
    """Run the command: exit status 0 done, 1 failed, 2 wrong use."""
    logging.basicConfig(format="%(message)s")
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        logging.getLogger("carnelian-export").error("%s", error)
        raise SystemExit(1) from error
