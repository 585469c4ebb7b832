"""Files that one process at a time holds, on this machine or, over NFS, on another."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


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
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file, and one that may be written to: NFS makes ranges of bytes of these locks, which folders do not have.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(refusal) from None
        except OSError as error:
            logger.warning("nothing keeps others out of %s: %s", path.parent, error.strerror)
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)  # whoever held it has removed it meanwhile
