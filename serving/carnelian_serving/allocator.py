"""What malloc does with freed memory: the server and its stubs keep it for the next clip."""

from collections.abc import Mapping

KEPT_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}
"""Variables for glibc. By its defaults the memory of a long clip goes back to the kernel while short ones pass, and the
next long clip pays for every page again: two thousand page faults in DALI alone."""
