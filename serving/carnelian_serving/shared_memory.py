"""The regions of /dev/shm that Triton's Python backend makes, for one server, and those that killed servers left.

Nobody else takes the latter back. In a container that is restarted they would count against the pod's memory until
there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from carnelian_serving.errors import ServerError

SHARED_MEMORY = Path("/dev/shm")
LEAST_BYTES = 48 * 2**20
"""The least free room to start with. A Python-based instance maps 1 MiB at first and grows with what passes through it,
for good: a minute of audio is 4 MiB. With less room than this, single clips of a minute are refused after a few."""
AMPLE_BYTES = 50 * 2**20
"""Enough room for each instance: seven hold 265 MiB while 64 callers send a minute each, and 345 MiB with batches of
32 such clips."""
REGIONS = "carnelian_"
"""The beginning of the names of every server's regions and of its folders of links to models, where Triton's own DALI
backend allows no `-`."""
_LOCK = "lock"
_LOCK_NAME = re.compile(rf"({REGIONS}\d+_[0-9a-f]{{8}}_){_LOCK}", re.ASCII)
"""Matches the name of a server's lock file; the group is its :attr:`Regions.prefix`."""


class Regions:
    """The shared-memory regions of one server."""

    def __init__(self) -> None:
        self.prefix = f"{REGIONS}{os.getpid()}_{secrets.token_hex(4)}_"
        """The beginning of their names."""
        self._lock: int | None = None

    @property
    def num_bytes(self) -> int:
        """The memory that the regions take, in bytes."""
        return sum(status.st_blocks * 512 for _, status in _find(self.prefix))

    def claim(self, scratch: str) -> tuple[int, ...]:
        """Mark the regions as in use until every process that inherits the returned file descriptors has ended.

        A process id would not do, because the servers of several containers may have the same one.

        Args:
            scratch: The server's own folder for temporary files, which is taken back together with the regions.

        Raises:
            ServerError: /dev/shm cannot be written to.
        """
        if SHARED_MEMORY.is_dir():
            path = SHARED_MEMORY / f"{self.prefix}{_LOCK}"
            new = path.with_suffix(".new")  # it is locked before others can find it
            try:
                self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
            except OSError as error:
                raise ServerError(
                    f"the server must be able to write to {SHARED_MEMORY}, but is not ({error.strerror}); mount a "
                    "tmpfs there that its user may write to, as `docker run --shm-size=1g` does"
                ) from error
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, os.fsencode(scratch))
            new.rename(path)
        return () if self._lock is None else (self._lock,)

    def close_to_others(self) -> None:
        """Close the regions, which hold what callers sent, to other users. Triton opens them, whatever the umask."""
        for region, status in _find(self.prefix):
            with contextlib.suppress(FileNotFoundError):  # Triton has removed it
                if not stat.S_ISDIR(status.st_mode):
                    region.chmod(0o600)

    def remove(self) -> None:
        """Remove the regions, once the server has ended. May be called twice."""
        _remove(self.prefix)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def find_free_bytes() -> int:
    """Return the free bytes of /dev/shm; 0 if it is not mounted."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0


def check_room(free_bytes: int) -> None:
    """Raise ServerError if /dev/shm has too little room for the Python backend."""
    if free_bytes < LEAST_BYTES:
        raise ServerError(
            f"the Python backend needs at least {LEAST_BYTES // 2**20} MiB in {SHARED_MEMORY}, but "
            f"{free_bytes / 2**20:.1f} MiB are free; in a container, start it with --shm-size=1g"
        )


def describe_shortage(room_bytes: int, num_instances: int) -> str:
    """Return a warning if /dev/shm is too small for long clips of many callers, else an empty string."""
    ample_bytes = num_instances * AMPLE_BYTES
    if room_bytes >= ample_bytes:
        return ""
    return (
        f"{SHARED_MEMORY} should have {ample_bytes // 2**20} MiB for {num_instances} Python-based instances, but has "
        f"{room_bytes // 2**20}: while it is full, clips are refused; in a container, start it with --shm-size=1g"
    )


def remove_leftovers() -> None:
    """Remove this user's regions that no process claims any more, and the same servers' folders for temporary files."""
    for path, _ in _find(REGIONS):
        name = _LOCK_NAME.fullmatch(path.name)
        if name is None:
            continue
        with contextlib.suppress(OSError):  # in use, or another server was faster
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                scratch = Path(os.fsdecode(path.read_bytes()))
                if scratch.name.startswith(name[1]) and scratch.exists() and scratch.lstat().st_uid == os.geteuid():
                    shutil.rmtree(scratch, ignore_errors=True)
                _remove(name[1])
            finally:
                os.close(lock)


def _find(prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the entries that this user owns, and their status; others may create such names too."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # Triton has removed it
            continue
        if status.st_uid == os.geteuid():
            yield path, status


def _remove(prefix: str) -> None:
    for region, status in _find(prefix):
        if not stat.S_ISDIR(status.st_mode):  # the scratch of a server whose TMPDIR is here
            region.unlink(missing_ok=True)
