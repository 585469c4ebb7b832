"""The command `carnelian-export`: write the model of a checkpoint into a Triton model repository."""

import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from carnelian_training.command_options import escape_output, folder, given_options, version_option

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _repository(path: str) -> Path:
    """Check the path of a repository, as it was typed: `Path` would make one `/` of the two in an address."""
    if re.match(r"\w+:/", path):  # it would become a folder called `s3:`
        raise typer.BadParameter(f"this must be a folder, to be copied to a bucket, but is {path}")
    return folder(path)


@app.command()
def export(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(help="A checkpoint of ours, a .nemo or .ckpt, a DLE or fairseq .pt, or a Hugging Face folder."),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The model's public name, for example quartznet_15x5; optional with --out."),
    ] = None,
    repository: Annotated[
        Path | None, typer.Option(parser=_repository, help="The folder that tritonserver loads.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For a neural language model, in place of --repository: the .onnx to write.")
    ] = None,
    model_format: Annotated[str, typer.Option("--format", help="onnx or tensorrt")] = "onnx",
    precision: Annotated[str, typer.Option(help="fp32, fp16; int8 of onnx; bf16 of tensorrt.")] = "fp32",
    provider: Annotated[
        str | None,
        typer.Option("--execution-provider", help="On a GPU: cuda, which then sees few shapes, or tensorrt."),
    ] = None,
    int8_clips: Annotated[
        Path | None,
        typer.Option(help="For int8: a manifest of clips like those to be served; at most 64 are read."),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="For TensorRT: kernel timings, read if it exists, and written; for one GPU and version."),
    ] = None,
    language_model: Annotated[
        Path | None, typer.Option("--lm", help="n-gram language model, ARPA or KenLM binary; deployed with the model.")
    ] = None,
    neural_language_model: Annotated[
        Path | None,
        typer.Option("--neural-lm", help="Neural language model, ONNX, to rescore with; deployed with the model."),
    ] = None,
    lm_weights: Annotated[
        Path | None, typer.Option(help="Weights of the language models, as `carnelian-train weigh` chose them.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What `carnelian-perf words` measured: corrects times and confidences.")
    ] = None,
    tuning: Annotated[
        Path | None,
        typer.Option(help="What `carnelian-perf tune` found for this machine: instances, threads, batching."),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="A default of the decoder, such as decoder=ngram; repeatable.")
    ] = None,
    version: Annotated[bool, version_option("carnelian-export")] = False,
) -> None:
    """Write a model's folders into a Triton repository, once the exported graph agrees with PyTorch.

    With --out: write a neural language model as one file, for rescoring.
    """
    for path in filter(None, (repository, out)):
        _check_openable(path)
    if out is not None:
        if others := given_options(context) - {"--name", "--out"}:
            raise typer.BadParameter(
                "--out, of a language model, must come with no option of a recogniser, but there is "
                f"{', '.join(sorted(others))}"
            )
        _export_language_model(source, name, out)
        return
    if name is None or repository is None:
        raise typer.BadParameter("--name and --repository must be given; of a language model, --out")
    from carnelian_export.target import Target, TargetError
    from carnelian_export.tuning import read_tuning

    try:
        target = Target(
            format=model_format,
            precision=precision,
            provider=provider,
            int8_clips=int8_clips,
            timing_cache=timing_cache,
            tuning=read_tuning(tuning) if tuning else {},
        )
    except TargetError as error:
        raise typer.BadParameter(str(error)) from error

    from carnelian_training.ctc import split_assignments
    from carnelian_training.foreign.sources import load_model
    from carnelian_training.language_models.weights import read_weights

    from carnelian_export.repository import write_model
    from carnelian_export.stages import Decoding

    defaults = read_weights(lm_weights, language_model, neural_language_model) | split_assignments(options or ())
    decoding = Decoding(
        language_model=language_model,
        options=defaults,
        calibration=calibration,
        neural_language_model=neural_language_model,
    )
    config, network = load_model(source, name)
    difference = write_model(repository, name, config, network, decoding, target)
    measure = "distributions, in the mean," if precision == "int8" else "log-probabilities above -50"
    print(f"{name} and {name}_pcm are in {repository}; {measure} within {difference:.1e} of PyTorch's")


def _check_openable(path: Path) -> None:
    """Refuse a path that is not UTF-8 before any work is done: ONNX Runtime could not open it."""
    try:
        str(path.resolve()).encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(
            "--repository and --out must be UTF-8, in a locale of UTF-8 such as LC_ALL=C.UTF-8, for ONNX Runtime opens "
            f"no other paths, but there is {os.fsencode(path.resolve())!r}"
        ) from error


def _export_language_model(source: Path, name: str | None, out: Path) -> None:
    from carnelian_training.checkpoint import load_language_model
    from carnelian_training.replacement import check_apart

    from carnelian_export.language_model import write_language_model

    check_apart(out, source)
    config, network = load_language_model(source)
    difference = write_language_model(out, name or config.name, config, network)
    print(f"{out}: {out.stat().st_size:,} bytes; log-probabilities within {difference:.1e} a token of PyTorch's")


def main() -> None:
    """Run the command. The exit status is 0 for success, 1 for a failure, 2 for a wrong command line."""
    logging.basicConfig(format="%(message)s")
    escape_output()
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that unfinished files are removed on the way out
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under `nohup`
            signal.signal(number, lambda *_: sys.exit(1))
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        from carnelian_training.ctc import OptionError  # of the decoder; loaded by then if it was raised

        typer.echo(f"carnelian-export: {str(error) or type(error).__name__}", err=True)
        raise SystemExit(2 if isinstance(error, OptionError) else 1) from error
