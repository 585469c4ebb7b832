"""Variables of the server and its stubs, unless the launcher has them already."""

from collections.abc import Mapping

KEPT_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_ARENA_MAX": "16",  # by default eight a core, and each keeps its own
    "DALI_MALLOC_POOL_THRESHOLD": "0",
}
"""For glibc and DALI: freed memory of a clip is kept for the next one, and no more. By glibc's defaults the memory of a
long clip goes back to the kernel while short ones pass, and the next long clip pays for every page again: two thousand
page faults in DALI alone. DALI's own pool, which 0 switches off, has what malloc would map, and keeps it for ever: up
to 512 MiB of each instance of `audio_decode` that once met a long file."""

FEW_THREADS: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy starts one for each core of the machine otherwise, in every stub, and no stub multiplies matrices with it."""

QUIET: Mapping[str, str] = {"ORT_DISABLE_TELEMETRY": "1"}
"""The wheels of ONNX Runtime from 1.30 on report to Microsoft otherwise, and keep a file in HOME for it."""
