"""Files that one process at a time holds, on this machine or, over NFS, on another."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 100
"""In a row that found the file removed; others come and go, or it is a link that leads nowhere."""


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold a file, which is made, and stays unless its holder removes it.

    The system lets others in if this process is killed. A file system without locks is warned of.

    Args:
        path: of the file; its folder is made.
        refusal: what the error says.

    Raises:
        ValueError: Another process holds it.
    """
    handle = _lock(path, refusal)
    try:
        yield
    finally:
        os.close(handle)


def _lock(path: Path, refusal: str) -> int:
    for _ in range(MOST_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # whoever held it has removed it meanwhile, and perhaps the folder
            # A file, and one that may be written to: NFS makes ranges of bytes of these locks, which folders do not
            # have.
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _take(handle, path, refusal)
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
    raise ValueError(refusal)


def _take(handle: int, path: Path, refusal: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None
    except OSError as error:
        logger.warning("nothing keeps others out of %s: %s", path.parent, error.strerror)
