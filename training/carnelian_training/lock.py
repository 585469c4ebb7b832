"""Lock files, each held by one process at a time, on this machine or, over NFS, on another."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from carnelian_training.replacement import written

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 100
"""The most attempts to lock a file that is removed each time: by other processes, or because it is a broken link."""


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file while the context lasts.

    The file is created and is not removed. If this process is killed, the system releases the lock. A file system
    without locks only gives a warning. `refusal` is the message of the error.

    Raises:
        ValueError: Another process holds the lock.
        WriteError: The file cannot be created or opened for writing.
    """
    with written(path):
        handle = _lock(path, refusal)
    try:
        yield
    finally:
        os.close(handle)


def _lock(path: Path, refusal: str) -> int:
    for _ in range(MOST_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last holder has just removed it, and perhaps its folder
            # The lock is on a file opened for writing, not on a folder, because NFS implements `flock` by locks on
            # byte ranges, which need such a file.
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
