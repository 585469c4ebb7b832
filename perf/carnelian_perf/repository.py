"""A Triton model repository under test: check that it has a recogniser, copy it, and change its configurations."""

import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb


class WrongModelError(ValueError):
    """The repository has no such recogniser."""


def check_model(repository: Path, model: str) -> None:
    """Raise WrongModelError unless the repository has this recogniser's ensemble and the stages that it names."""
    if not repository.is_dir():
        raise WrongModelError(f"`--repository` must be a folder of Triton models, but {repository} is not there")
    found = sorted(path.name.removesuffix("_acoustic") for path in repository.glob("*_acoustic"))
    if model not in found or not (repository / model / "config.pbtxt").is_file():
        raise WrongModelError(
            f"`--model` must name a recogniser of {repository}, but is {model!r}; it has {', '.join(found) or 'none'}"
        )
    stages = list_stages(repository, model)
    if missing := [stage for stage in stages if not (repository / stage / "config.pbtxt").is_file()]:
        raise WrongModelError(f"{repository} must have every stage of {model}, but lacks {', '.join(missing)}")


def list_stages(repository: Path, model: str) -> list[str]:
    """List the stages of a recogniser, as its ensemble for files names them."""
    return [step.model_name for step in read_config(repository / model).ensemble_scheduling.step]


def copy_model(shipped: Path, target: Path, model: str) -> None:
    """Copy a recogniser's ensemble for files and its stages into a new repository."""
    for folder in (model, *list_stages(shipped, model)):
        shutil.copytree(shipped / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))


def read_config(folder: Path) -> pb.ModelConfig:
    """Parse a model folder's `config.pbtxt`.

    Raises:
        WrongModelError: The file is not a model's configuration.
    """
    path = folder / "config.pbtxt"
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise WrongModelError(f"{path} must be a model's configuration, but is not: {error}") from error


def write_config(folder: Path, config: pb.ModelConfig) -> None:
    """Write a model folder's `config.pbtxt`."""
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
