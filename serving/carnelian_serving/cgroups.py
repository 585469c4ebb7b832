"""Finds the control groups of this process, such as those of a container or of a unit of systemd."""

from __future__ import annotations

import contextlib
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
"""Names the groups. Inside a container the names may be those outside, which do not lie under :data:`GROUPS`: there the
container's own group is the outermost."""
GROUPS = Path("/sys/fs/cgroup")


def own_folders(controller: str) -> list[Path]:
    """Return the folders of this process's groups and of those around them, as far as they may have a `controller`.

    They are of version 1, of version 2 or, where a system has both, of both. Some need not exist.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # version 2 names none
                group = GROUPS / (controllers and controller) / name.lstrip("/")
                folders += [group, *group.parents]
    return folders
