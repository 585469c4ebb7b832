"""What becomes of freed memory: the server and its stubs keep that of a clip for the next one, and no more."""

from collections.abc import Mapping

KEPT_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "DALI_MALLOC_POOL_THRESHOLD": "0",
}
"""Variables for glibc and DALI. By glibc's defaults the memory of a long clip goes back to the kernel while short ones
pass, and the next long clip pays for every page again: two thousand page faults in DALI alone. DALI's own pool, which 0
switches off, has what malloc would map, and keeps it for ever: up to 512 MiB of each instance of `audio_decode` that
once met a long file."""
