"""Environment variables that the server and its stubs get, unless the launcher's environment has them already.

And those that they do not get.
"""

from collections.abc import Mapping

KEPT_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_ARENA_MAX": "16",  # by default eight a core, and each keeps its own
    "DALI_MALLOC_POOL_THRESHOLD": "0",
}
"""Makes glibc and DALI keep the freed memory of a clip for the next one, and no more. By glibc's defaults, the memory
of a long clip goes back to the kernel while short clips pass, and the next long clip pays for every page again: two
thousand page faults in DALI alone. DALI's own pool (0 switches it off) would keep large blocks for ever: up to 512 MiB
in each instance of `audio_decode` that once had a long file."""

FEW_THREADS: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""Otherwise NumPy starts a thread for each core, in every stub, though no stub multiplies matrices with it."""

QUIET: Mapping[str, str] = {"ORT_DISABLE_TELEMETRY": "1"}
"""Otherwise the wheels of ONNX Runtime report to Microsoft, from 1.30 on, and keep a file in HOME for that."""

STUB_PRELUDE = """cd "$TMPDIR"; unset BASH_ENV
for file in /proc/$$/fd/*; do fd=${file##*/}; [[ -S $file ]] && ((fd > 2)) && exec {fd}>&-; done; unset file fd
"""
"""What bash runs first, if `BASH_ENV` names a file of it. Triton starts its stubs through bash, and their Python looks
for modules in the current folder first: it would take a `model.py` there for the backend's. The stub of a model that is
loaded into a running server also gets the server's HTTP connections, which then stay open when the server closes them.
"""

VERTEX_AI_PREFIX = "AIP_"
"""How the names begin of what Google's Vertex AI sets. By `AIP_MODE` Triton opens a port on every address, whatever
`--host` says, and through it all protocols, those that are closed by a key as well."""
