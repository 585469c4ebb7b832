"""What the system allows tritonserver: room on its threads' stacks, and open files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

THREAD_STACK_BYTES = 64 * 2**20
"""Triton 2.51 puts two copies of an HTTP body on its thread's stack if the body calls itself a form, as curl's do,
and crashes where they do not fit: from 4 MB on with the usual 8 MiB. Pages that are not used cost no memory, but
address space: of that the server then has some 20 GB, which a batch system may not allow (`ulimit -v`)."""
OPEN_FILES = 65_536
"""Each connection is one. Where they run out, Triton logs that without a pause, megabytes a second."""


@contextlib.contextmanager
def raised_limits() -> Iterator[None]:
    """A process that is started meanwhile may have THREAD_STACK_BYTES and OPEN_FILES, where that is allowed."""
    has_room = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    stacks = _raised(resource.RLIMIT_STACK, THREAD_STACK_BYTES) if has_room else contextlib.nullcontext()
    with stacks, _raised(resource.RLIMIT_NOFILE, OPEN_FILES):
        yield


@contextlib.contextmanager
def _raised(limit: int, wanted: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY:  # where there is no limit glibc takes 2 MiB for a stack
        wanted = max(wanted, soft)
    resource.setrlimit(limit, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))
