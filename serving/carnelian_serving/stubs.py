"""Watches the stub processes in which tritonserver runs Python-based models.

Triton 2.51 does not start a stub again that has crashed: it stays a zombie, its instance answers every
request with "Stub process ... is not healthy", and the server goes on calling itself ready.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_COLLECTED_WITHIN_S = 0.1  # by Triton, if it has ended a stub itself
_INSTANCE_ARGUMENT = 8  # of the stub's command line: the name of the model instance


class StubWatch:
    """Tells which instances of a server have lost their stub."""

    def __init__(self, server_pid: int) -> None:
        """Watch the children of a server.

        Args:
            server_pid: Process id of `tritonserver`.
        """
        self._server_pid = server_pid
        self._instances: dict[int, str] = {}
        self._uncollected: set[int] = set()

    @property
    def num_instances(self) -> int:
        """How many have been seen and still are there: Triton has started others to read configurations alone."""
        return sum((_PROC / str(pid)).exists() for pid in self._instances)

    def crashed(self) -> list[str]:
        """Return the instances whose stub is uncollected and was at the last call: Triton collects what it unloads."""
        ended = set()
        for pid in _children(self._server_pid):
            with contextlib.suppress(OSError):
                name, _, fields = (_PROC / str(pid) / "stat").read_text().partition("(")[2].rpartition(")")
                if fields.split()[0] == "Z":
                    # A server that is crashing itself has other children: they look up its stack's symbols.
                    if pid in self._instances or _STUB.startswith(name):
                        ended.add(pid)
                elif pid not in self._instances:
                    instance = find_instance((_PROC / str(pid) / "cmdline").read_text().split("\0"))
                    if instance is not None:  # else it is between fork and exec
                        self._instances[pid] = instance
        crashed, self._uncollected = ended & self._uncollected, ended
        return sorted(self._instances.get(pid, f"process {pid}") for pid in crashed)

    def crashed_by_now(self) -> list[str]:
        """Return :meth:`crashed` without waiting for the next call: look again at once if a stub is uncollected."""
        crashed = self.crashed()
        if self._uncollected and not crashed:
            time.sleep(_COLLECTED_WITHIN_S)
            crashed = self.crashed()
        return crashed


def find_instance(command: Sequence[str]) -> str | None:
    """Return the model instance that a stub of this command line runs; None if it is no stub's."""
    is_stub = len(command) > _INSTANCE_ARGUMENT and _STUB in command[0]
    return command[_INSTANCE_ARGUMENT] if is_stub else None


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process; none where the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found
