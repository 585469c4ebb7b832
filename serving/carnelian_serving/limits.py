"""The limits of tritonserver: the size of its threads' stacks, open files, and the number of its threads."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

from carnelian_serving.cgroups import own_folders

THREAD_STACK_BYTES = 64 * 2**20
"""The size of a thread's stack. If an HTTP body calls itself a form, as curl's do, Triton 2.51 puts two copies of it on
the stack, and crashes if they do not fit: from 4 MB on with the usual 8 MiB. Unused pages cost no memory but address
space: the server has some 20 GB of it, which a batch system may forbid (`ulimit -v`)."""
OPEN_FILES = 65_536
"""The limit of open files. Each connection is one; if they run out, Triton logs megabytes a second about it."""
OUT_OF_THREADS = (
    "it ran out of threads, processes or memory; allow more (`pids.max` of the container, `ulimit -u`, `-v`, `-d`)"
)


@contextlib.contextmanager
def raised_limits() -> Iterator[None]:
    """Give processes that are started meanwhile THREAD_STACK_BYTES and OPEN_FILES, as far as that is allowed."""
    has_room = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    stacks = _raised(resource.RLIMIT_STACK, THREAD_STACK_BYTES) if has_room else contextlib.nullcontext()
    with stacks, _raised(resource.RLIMIT_NOFILE, OPEN_FILES):
        yield


def num_refused_threads() -> int:
    """Return how often `pids.max` has refused this process's control groups a thread or process, if the kernel says it.

    From Linux 6.11 on, version 2 counts that where the limit is, in the group or in one around it, whose `pids.events`
    has what others in it were refused by limits of their own as well. Before, it counts where the process is.
    """
    num_refused = 0
    for folder in own_folders("pids"):
        for file in ("pids.events.local", "pids.events"):
            with contextlib.suppress(OSError):
                num_refused += int((folder / file).read_text().split()[1])
                break
    return num_refused


@contextlib.contextmanager
def _raised(limit: int, wanted: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY:  # without a limit, glibc gives a stack 2 MiB
        wanted = max(wanted, soft)
    resource.setrlimit(limit, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))
