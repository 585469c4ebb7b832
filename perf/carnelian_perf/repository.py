"""A Triton model repository under test: is the recogniser there, and copies of it whose configurations are changed."""

import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb


class WrongModelError(ValueError):
    """The repository has no such recogniser."""


def check_model(repository: Path, model: str) -> None:
    """Raise WrongModelError unless the repository has the five folders of this recogniser."""
    if not repository.is_dir():
        raise WrongModelError(f"`--repository` must be a folder of Triton models, but {repository} is not there")
    acoustic = "_acoustic"
    found = sorted(path.name[: -len(acoustic)] for path in repository.glob(f"*{acoustic}"))
    if model not in found or not (repository / model / "config.pbtxt").is_file():
        raise WrongModelError(
            f"`--model` must name a recogniser of {repository}, but is {model!r}; it has {', '.join(found) or 'none'}"
        )


def copy_model(shipped: Path, target: Path, model: str) -> pb.ModelConfig:
    """Copy a recogniser that takes files into a new repository; return its ensemble's configuration."""
    ensemble = read_config(shipped / model)
    target.mkdir(parents=True)
    for folder in (model, *(step.model_name for step in ensemble.ensemble_scheduling.step)):
        shutil.copytree(shipped / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return ensemble


def read_config(folder: Path) -> pb.ModelConfig:
    """Parse a model folder's `config.pbtxt`."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())


def write_config(folder: Path, config: pb.ModelConfig) -> None:
    """Write a model folder's `config.pbtxt`."""
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
