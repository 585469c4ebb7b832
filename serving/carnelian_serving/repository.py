"""The model repository as the command line names it: whether it can be served, and under which path."""

import re
from collections.abc import Sequence
from pathlib import Path

from carnelian_serving.errors import ServerError

_PLAIN_PATH = re.compile(r"[\w./+,:=@%#~^-]*", re.ASCII)
"""Triton starts its Python stubs by a shell, and their Python reads paths as ASCII."""


def check_repository(repository: Path, models: Sequence[str]) -> None:
    """Raise ServerError unless the repository holds models, and all that are asked for."""
    if not repository.is_dir():
        what = "is a file" if repository.exists() else "is not there"
        raise ServerError(f"`--repository` must be a folder of models, but {repository} {what}")
    found = sorted(path.name for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise ServerError(f"`--repository` must hold at least one model folder, but {repository} has none")
    for name in models or found:
        if not is_plain(name):
            raise ServerError(
                f"a model folder's name must be of ASCII letters, digits, `_`, `-` and `.`, but {name!r} of "
                f"{repository} is not"
            )
    for name in models:
        if name not in found:
            raise ServerError(
                f"`--model` must name a model of {repository}, but {name!r} is not there; it has {', '.join(found)}"
            )


def is_plain(path: str) -> bool:
    """Whether Triton can hand a path to its Python stubs."""
    return _PLAIN_PATH.fullmatch(path) is not None


def plain_path(repository: Path, scratch: Path) -> Path:
    """The repository, by a link in the folder `scratch` where its own path is not plain."""
    if is_plain(str(repository)):
        return repository
    link = scratch / "model_repository"
    link.symlink_to(repository)
    return link
