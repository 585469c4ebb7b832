"""Keeps a pipeline's only thread on its caller's core, because the two take turns.

Each operator is handed from the caller to that thread and back. Linux may wake either on another core, which sleeps;
that takes longer than most operators, and the features of 2 s 1.3 ms in place of 0.4.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None)


def list_threads() -> set[int]:
    """Return the ids of this process's threads."""
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


@contextlib.contextmanager
def shared_core(threads: Collection[int]) -> Iterator[None]:
    """Keep this thread and others on the core where this one runs now; afterwards its own affinity is as before.

    Args:
        threads: Ids of threads of this process. They stay on that core.
    """
    allowed, core = os.sched_getaffinity(0), {_LIBC.sched_getcpu()}
    with contextlib.suppress(OSError):  # the process may have been given other cores this moment
        for thread in (*threads, 0):
            os.sched_setaffinity(thread, core)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, allowed)
