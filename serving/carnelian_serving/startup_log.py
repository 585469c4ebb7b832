"""Reads Triton's log: why it did not start, and which lines a reader need not see."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RECORD = re.compile(r'^[IWEF]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "?(?P<text>.*?)"?$')
_MODEL_FAILED = re.compile(r"^failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.+)$", re.DOTALL)
_POLL_FAILED = re.compile(r"^Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.+)$", re.DOTALL)
_START_FAILED = re.compile(r"^error: (?P<reason>.+)$")
_STATUS_WORD = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unknown|Unsupported)(: | - )")

# What tritonserver says at every level: on each machine without a GPU, and when the launcher ends it.
_NOISE = (
    "Unable to allocate pinned system memory",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Signal (15) received.",
)


def is_noise(line: str) -> bool:
    """Returns whether a line says nothing but that there is no GPU, or that the launcher ended the server."""
    return any(text in line for text in _NOISE)


def find_reasons(lines: Iterable[str]) -> list[str]:
    """Returns why the server did not start, one sentence for each model that failed, or its last error.

    Args:
        lines: The log, in order.
    """
    models: dict[str, str] = {}
    last_error = None
    for line in lines:
        record = _RECORD.match(line)
        text = (record["text"] if record else line).replace("\\n", "\n").replace('\\"', '"')
        failed = _MODEL_FAILED.match(text) or _POLL_FAILED.match(text)
        if failed:
            models[failed["model"]] = _shorten(failed["reason"])
        elif start := _START_FAILED.match(text):
            last_error = _shorten(start["reason"])
    if models:
        return [f"model {name!r} could not be loaded: {reason}" for name, reason in models.items()]
    return [last_error] if last_error else []


def _shorten(reason: str) -> str:
    """Leaves Triton's status word and all but the innermost frame of a Python traceback out."""
    reason = _STATUS_WORD.sub("", reason.strip())
    message, at, frames = reason.partition("\n\nAt:\n")
    if not at:
        return message
    return f"{message} (at {frames.strip().splitlines()[0].strip()})"
