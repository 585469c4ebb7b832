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
    """Hold a file, which is made; it stays, for another may have opened it and would hold what nobody finds.

    The system lets others in if this process is killed. A file system without locks is warned of.

    Args:
        path: of the file, in a folder that is there.
        refusal: what the error says.

    Raises:
        ValueError: Another process holds it.
    """
    # A file, and one that may be written to: NFS makes ranges of bytes of these locks, which folders do not have.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError as error:
            logger.warning("nothing keeps others out of %s: %s", path.parent, error.strerror)
        yield
    finally:
        os.close(handle)
