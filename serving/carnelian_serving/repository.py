"""Checks that a model repository can be served, and chooses the path that Triton gets."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from carnelian_serving.errors import ServerError

_PLAIN_PATH = re.compile(r"[\w./+,:=@%^-]*", re.ASCII)
"""Paths that Triton's Python backend can take: it starts its stubs through a shell, and their Python reads ASCII."""
_PLAINEST_PATH = re.compile(r"(?!.*\.\.)[\w./]*", re.ASCII)
"""Paths that Triton's own DALI backend has taken since 2025."""
_STAGE = re.compile(r"""#.*|\bmodel_name\s*:\s*(["'])(?P<name>.*?)\1|(["'])(?:\\.|.)*?\3""")
"""Finds the stages in an ensemble's configuration, skipping comments and other strings."""


def check_repository(repository: Path, models: Sequence[str]) -> None:
    """Raise ServerError unless the repository holds models, and all of `models`."""
    try:
        if not repository.is_dir():
            what = (
                "is a file" if repository.exists() else "leads nowhere" if repository.is_symlink() else "is not there"
            )
            raise ServerError(f"`--repository` must be a folder of models, but {repository} {what}")
        found = sorted(path.name for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError as error:
        wanted = Path(os.path.realpath(error.filename))  # the repository, or what a link in it leads to
        closed = (folder for folder in reversed(wanted.parents) if not os.access(folder, os.X_OK, effective_ids=True))
        folder, mode = next(((folder, "a+x") for folder in closed), (wanted, "-R a+rX"))
        raise ServerError(
            f"`--repository` must be a folder that uid {os.geteuid()} may read, but {folder} is closed to it; run "
            f"`chmod {mode} {quote(str(folder))}`"
        ) from None
    if (repository / "config.pbtxt").exists():
        raise ServerError(
            f"`--repository` must be a folder of models' folders, but {repository} is a model's own: give the folder "
            f"that it is in, {repository.resolve().parent}"
        )
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


def find_repository(repository: Path) -> Path:
    """Return the absolute path of a repository, with its links: what they lead to may be swapped while it is served.

    Raises:
        ServerError: The working directory was removed.
    """
    try:
        return repository.absolute()
    except FileNotFoundError:
        raise ServerError(
            f"the working directory must be there, to find {repository}, but it was removed: change into another"
        ) from None


def is_plain(path: str) -> bool:
    """Whether Triton can hand a path to its Python stubs."""
    return _PLAIN_PATH.fullmatch(path) is not None


def served_path(repository: Path, models: Sequence[str], scratch: Path) -> Path:
    """Return the folder that Triton gets: the repository, or a folder of links to it in `scratch`.

    That is a link where a native Triton may refuse the repository's own path, and a folder of links to models and
    their stages where some are chosen. Triton's own way to choose lets every caller load code that it sends.
    """
    path = scratch / "model_repository"
    if models:
        path.mkdir()
        for name in _add_stages(repository, models):
            (path / name).symlink_to(repository / name)
    elif _PLAINEST_PATH.fullmatch(str(repository)):
        return repository
    else:
        path.symlink_to(repository)
    return path


def _add_stages(repository: Path, models: Sequence[str]) -> list[str]:
    """Return the models and the stages of the ensembles among them, as far as they are there."""
    folders = {path.name for path in repository.iterdir()}
    names = list(dict.fromkeys(models))
    for name in names:  # `names` grows: a stage may be an ensemble, too
        config = repository / name / "config.pbtxt"
        if config.is_file():
            stages = {match["name"] for match in _STAGE.finditer(config.read_text(errors="replace"))}
            names += sorted(stages & folders - set(names))
    return names
