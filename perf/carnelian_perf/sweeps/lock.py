"""The lock of a sweep's folder, so that only one sweep at a time works in it."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from carnelian_perf.sweeps.grid import GridError

LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps on this machine out of a folder; make it if needed, and remove a new one that stays empty.

    The lock ends with this process, even if it is killed. The folder itself is locked, so no lock file is left in it.

    Raises:
        GridError: Another sweep works in the folder, or it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise GridError(f"a sweep's results must be in a folder, but {folder} is a file; name another (--out)")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GridError(
                f"{folder} must be the folder of one sweep, but another one works in it: wait for that, or name "
                "another (--out)"
            ) from None
        except OSError as error:  # a file system without locks
            LOGGER.warning("nothing keeps other sweeps out of %s: %s", folder, error.strerror)
        yield
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        os.close(handle)
