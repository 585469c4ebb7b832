"""The shared memory of servers that were killed: found by the next one, for nobody else takes it back.

In a container that is restarted it would count against the pod's memory until there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"


def claim(prefix: str) -> int:
    """Says that regions whose names begin so are in use, until all processes that have this descriptor have ended.

    Returns:
        An open file, whose lock says it. A process id would not do: in containers all servers may have the same.
    """
    path = SHARED_MEMORY / f"{prefix}{LOCK}"
    new = path.with_suffix(".new")  # locked before anybody looks at it
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(path)
    return lock


def remove_leftovers() -> None:
    """Removes the regions that nobody claims any more."""
    for path in SHARED_MEMORY.glob(f"carnelian-*-{LOCK}"):
        with contextlib.suppress(OSError):  # in use, another user's, or another server was faster
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for region in SHARED_MEMORY.glob(f"{path.name.removesuffix(LOCK)}*"):
                    region.unlink(missing_ok=True)
            finally:
                os.close(lock)
