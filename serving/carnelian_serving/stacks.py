"""The stacks of tritonserver's threads, on which an ordinary upload by curl does not fit."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

THREAD_STACK_BYTES = 64 * 2**20
"""Triton 2.51 puts two copies of an HTTP body on its thread's stack if the body calls itself a form, as curl's do,
and crashes where they do not fit: from 4 MB on with the usual 8 MiB. Pages that are not used cost no memory."""


@contextlib.contextmanager
def roomy_stacks() -> Iterator[None]:
    """A process that is started meanwhile gives its threads THREAD_STACK_BYTES each, where that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = THREAD_STACK_BYTES if hard == resource.RLIM_INFINITY else min(THREAD_STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY:  # where there is no limit glibc takes 2 MiB
        wanted = max(wanted, soft)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
