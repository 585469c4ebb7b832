"""Finds in Triton's log why it did not start, and which lines a reader need not see."""

from __future__ import annotations

import re
from collections.abc import Iterable

from carnelian_serving.limits import OUT_OF_THREADS

_RECORD = re.compile(
    r"^(?:(?P<level>[IWEF])\d{4} [\d:.]+|[\dT:-]+Z (?P<iso_level>[IWEF])) +\d+ [\w.]+:\d+\] +"
    r'"?(?P<text>.*?)"?$'
)
"""Matches the beginning of a line in both of Triton's formats (ISO8601 has the level after the time), and in gRPC's."""
_MODEL_FAILED = re.compile(
    r"^(?:failed to load '(?P<version_of>[^']+)' version \d+|failed to load model '(?P<model>[^']+)'"
    r"|Poll failed for model directory '(?P<folder>[^']+)'): (?P<reason>.+)$",
    re.DOTALL,
)
_SYNTAX_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (?P<where>.+)$")
_NO_MODEL = re.compile(r"at least one version must be available|Could not determine backend for model")
"""Matches what Triton says about folders that are no models, such as `.git` and `lost+found`. If it may not open one,
it says so, with the path at the end."""
_CRASHED = "is not healthy."
_CRASHED_OR_PAUSED = (
    "it may have crashed, as where memory has run out, or the machine paused a second, or its clock jumped"
)
_FAILED = re.compile(r"\bFailed to create instance: |\bfailed to load '")
_SHORTAGES = {
    # The HTTP server's words; Triton takes them for a port in use.
    re.compile("Too many open files"): "it ran out of open files; allow more (`ulimit -n`)",
    # The words of OpenBLAS, of std::thread, and of the system, which DALI passes on.
    re.compile("pthread_create failed|std::system_error|Resource temporarily unavailable"): OUT_OF_THREADS,
    # The dynamic linker's.
    re.compile("failed to map segment"): (
        "it could not load a library; allow more address space (`ulimit -v`), or keep libraries where programs may run "
        "(a mount without noexec)"
    ),
}
_GRPC_PORT_TAKEN = re.compile("^UNKNOWN:.*Address already in use")
"""Matches gRPC's account of a port that is in use; Triton says it again in fewer words."""
_START_FAILED = re.compile(r"^error: ")
_GAVE_UP = re.compile(r"^error: creating server: ")
"""Matches what tritonserver writes last of all, into no `--log-file`, before it ends with status 1."""
_SIGNAL = re.compile(r"^Signal \((4|6|7|8|11)\) received\.")
"""Matches what tritonserver writes when it crashes."""
_STATUS_WORD = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unknown|Unsupported)(: | - )")

_USAGE = "Usage: tritonserver [options]"
"""The help of tritonserver that follows, 400 lines: headings and indented lines. Other lines say what was wrong."""

# Lines that tritonserver writes at every log level: on machines without a GPU, as the native DALI backend tries to read
# `dali.py` as a serialised pipeline, and when the launcher ends it.
_NOISE = re.compile(
    "Unable to allocate pinned system memory|CudaDriverHelper has not been initialized|Failed to initialize NVML"
    "|no pinned memory pool|unable to create stream for .*: (CUDA driver version is insufficient|no CUDA-capable)"
    "|DCGM unable to start|All log messages before absl::InitializeLog"
    '|Can\'t parse message of type "dali_proto.PipelineDef"'
    r"|Signal \(15\) received\."
)


def is_noise(line: str) -> bool:
    """Return whether a line only says what is so at every start or end of a good server."""
    return _NOISE.search(line) is not None


def tells_of_failure(line: str) -> bool:
    """Return whether a line says that a model, or an instance of one, could not be loaded."""
    return _FAILED.search(line) is not None


def tells_of_end(line: str) -> int | None:
    """Return the exit status of the end that a line tells of, as `subprocess` gives it: a crash, or a failed start."""
    if crash := _SIGNAL.match(line):
        return -int(crash[1])
    return 1 if _GAVE_UP.match(line) else None


def find_reasons(lines: Iterable[str]) -> list[str]:
    """Return why the server did not start: a sentence for each model that failed, else the log's errors.

    Args:
        lines: The log, in order.
    """
    lines = list(lines)
    if _USAGE in lines:
        stated = [
            line for line in lines if line == line.strip() and not line.endswith(":") and line not in ("", _USAGE)
        ]
        wrong = [line.rpartition("tritonserver: ")[2] for line in stated if not is_noise(line)]
        return wrong or ["its options were asked for (`--help`)"]
    models: dict[str, str] = {}
    errors: list[str] = []
    syntax_error = ""
    for line in lines:
        record = _RECORD.match(line)
        text = (record["text"] if record else line).replace("\\n", "\n").replace('\\"', '"')
        if is_noise(line) or _GRPC_PORT_TAKEN.match(text):
            continue
        if syntax := _SYNTAX_ERROR.search(text):
            syntax_error = f" (line {syntax['where']})"  # protobuf writes it just before Triton names the model
        elif failed := _MODEL_FAILED.match(text):
            name = failed["version_of"] or failed["model"] or failed["folder"]
            models[name] = _shorten(failed["reason"]) + syntax_error
            syntax_error = ""
            if models[name].endswith(_CRASHED):
                models[name] = f"{models[name].rstrip('.')}; {_CRASHED_OR_PAUSED}"
            if _NO_MODEL.search(failed["reason"]) or (failed["folder"] and failed["reason"].endswith(f"/{name}")):
                models[name] += "; if this folder is no model, move it away, or name those to serve by `--model`"
        elif (record and (record["level"] or record["iso_level"]) in "EF") or _START_FAILED.match(text):
            errors.append(_shorten(text))
    failed_models = [f"model {name!r} could not be loaded: {reason}" for name, reason in models.items()]
    shortages = [words for sign, words in _SHORTAGES.items() if any(map(sign.search, lines))]
    # All instances of a model say the same.
    return [*shortages, *failed_models] or list(dict.fromkeys(errors))


def _shorten(reason: str) -> str:
    """Remove Triton's status word, and all but the innermost frame of a Python traceback."""
    reason = _STATUS_WORD.sub("", reason.strip())
    message, at, frames = reason.partition("\n\nAt:\n")
    if not at:
        return message
    return f"{message} (at {frames.strip().splitlines()[0].strip()})"
