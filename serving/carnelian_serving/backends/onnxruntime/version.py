"""Reads the version of ONNX Runtime."""

from __future__ import annotations

import re


def parse_version(version: str) -> tuple[int, int]:
    """Return the major and the minor version; (0, 0) for a build whose version has another form."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
