"""Raw files: how each measurement says where it is from, and how it is written and read."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from carnelian_perf.machine import describe_machine, find_versions

T = TypeVar("T")


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def describe_origin(commit: str | None) -> dict[str, Any]:
    """When, by which command, from what, on what and with what something was measured.

    Args:
        commit: What was measured. :func:`carnelian_perf.machine.find_commit` tells; before a long measurement, since
            a raw file that is checked in changes the tree.
    """
    return {
        "date": now(),
        "command": shlex.join(["carnelian-perf", *sys.argv[1:]]),
        "commit": commit,
        "machine": describe_machine(),
        "versions": find_versions(),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a raw file, and its folder where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read(path: Path, subject: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read what the command `subject` wrote, by its own `parse`.

    Raises:
        ValueError: The file is no raw file of that command.
    """
    try:
        return parse(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a raw file of `carnelian-perf {subject}`, but is none: {error!r}") from error
