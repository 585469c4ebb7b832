"""What the commands of all distributions have in common."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("folder", ["client", "export", "perf", "serving", "training"])
def test_a_command_tells_its_version_with_nothing_else_given(folder):
    """Messages spoke of another version, and no command told its own."""
    distribution = importlib.metadata.distribution(f"carnelian-{folder}")
    [script] = distribution.entry_points
    command = [Path(sys.executable).with_name(script.name), "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == (f"{distribution.name} {distribution.version}\n", "")
    assert result.returncode == 0
