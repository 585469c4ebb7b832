"""Prepare a model's folders where no server finds them, then put them in place; exports take turns."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from carnelian_training.interruption import Interruption
from carnelian_training.replacement import written

logger = logging.getLogger(__name__)


@contextmanager
def held(repository: Path) -> Iterator[None]:
    """Make other exports on this machine wait; make the repository if needed, and remove a new one that stays empty."""
    with written(repository):
        handle, made = _lock(repository)
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # something is in it
                folder.rmdir()
        os.close(handle)


def _lock(repository: Path) -> tuple[int, list[Path]]:
    """Lock the folder itself, so that no lock file is left in it.

    Returns:
        Its descriptor, which holds the lock, and the folders that were made for it, the deepest first.
    """
    made: list[Path] = []
    while True:
        made[:0] = [folder for folder in (repository, *repository.parents) if not folder.exists()]
        repository.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as opened:  # an export that failed may remove it meanwhile
            handle = os.open(repository, os.O_RDONLY)
            opened.callback(os.close, handle)
            _wait_for_lock(repository, handle)
            if os.path.samestat(repository.stat(), os.fstat(handle)):
                opened.pop_all()
                return handle, made


def _wait_for_lock(repository: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("another export writes into %s: waiting until it has ended", repository)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks
        logger.warning("nothing keeps other exports out of %s meanwhile: %s", repository, error.strerror)


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """Make a temporary folder and delete it at the end; warn if another user's files cannot be deleted from it."""
    with written(place):
        folder = Path(tempfile.mkdtemp("", ".carnelian-export-", place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning("%s is left over, with files that this user may not delete: delete it as theirs", folder)


def find_place(repository: Path, replaced: set[str]) -> Path:
    """Choose where to make the temporary folder; `replaced` names the models whose folders will be.

    It is beside the repository, or in it if that is a mounted volume, or if the folder around it may not be written to.
    Triton takes each folder of a repository for a model, even a hidden one, and starts without any model if one cannot
    be loaded. But in a model's folder it ignores all folders whose name is no number. So in the repository, the folder
    of a model that stays is chosen, if there is one.
    """
    whole = repository.resolve()
    models = [path.parent for path in sorted(whole.glob("*/config.pbtxt"))]
    places = [whole.parent, *(model for model in models if model.name not in replaced)]
    return next((place for place in places if _can_hold(place, repository)), whole)


def _can_hold(place: Path, repository: Path) -> bool:
    """Try whether a temporary folder can be made in a place, and what is in it be moved into the repository.

    One disk may be mounted twice, and nothing is moved from mount to mount. Triton takes no file for a model.
    """
    try:
        with tempfile.TemporaryDirectory("", ".carnelian-export-", place) as folder:
            Path(folder, "tried").touch()
            Path(folder, "tried").replace(repository / Path(folder).name).unlink()
    except OSError:
        return False
    return True


def flush(folder: Path) -> None:
    """Flush all files to the disk: otherwise a power cut could leave empty files under a model's name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def put_in_place(repository: Path, folders: Sequence[Path], replaced: Path) -> None:
    """Replace all folders or none: moving one may fail, for example because it belongs to another user."""
    replaced.mkdir()
    with Interruption(), ExitStack() as undo:  # a signal would leave a name without its folder; this takes no time
        for folder in folders:
            place, old = repository / folder.name, replaced / folder.name
            if place.exists():
                place.rename(old)
                undo.callback(old.rename, place)
            folder.rename(place)
            undo.callback(place.rename, folder)
        undo.pop_all()
