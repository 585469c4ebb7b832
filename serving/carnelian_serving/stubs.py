"""Watches the stub processes in which tritonserver runs Python-based models.

Triton 2.51 does not start a stub again that has crashed: it stays a zombie, its instance answers every
request with "Stub process ... is not healthy", and the server goes on calling itself ready. Nor do all stubs end whose
server is killed: one that was about to take its next message, as while models load, waits for it for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from carnelian_serving.endings import Crash

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_COLLECTED_WITHIN_S = 0.1  # Triton collects a stub in this time if it ended it itself
_REGION_ARGUMENT = 2  # of the stub's command line: the name of its shared memory
_INSTANCE_ARGUMENT = 8  # the name of the model instance
_EXIT_FIELD = 49  # of /proc/PID/stat, after the name: the status as `waitpid` gives it
_SERVER = "tritonserver"
_END_S = 1.0


class StubWatch:
    """Finds the instances of a server whose stub has crashed or is stopped."""

    def __init__(self, server_pid: int) -> None:
        """Watch the children of a server.

        Args:
            server_pid: Process id of `tritonserver`.
        """
        self._server_pid = server_pid
        self._instances: dict[int, str] = {}
        self._uncollected: set[int] = set()
        self._num_stopped: dict[int, int] = {}

    @property
    def num_instances(self) -> int:
        """The number of stubs that run; Triton also starts some for a moment, to read configurations."""
        return sum((_PROC / str(pid)).exists() for pid in self._instances)

    def crashed(self) -> list[Crash]:
        """Return the instances whose stub has ended and is uncollected, now and at the last call.

        Those that it unloads Triton collects in between.
        """
        ended = {}
        for pid in _children(self._server_pid):
            with contextlib.suppress(OSError):
                name, fields = _read_stat(pid)
                if fields[0] == "Z":
                    # A server that is crashing has other children too, which look up the symbols of its stack.
                    if pid in self._instances or _STUB.startswith(name):
                        ended[pid] = os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
                elif pid not in self._instances:
                    instance = find_instance((_PROC / str(pid) / "cmdline").read_text().split("\0"))
                    if instance is not None:  # None: between fork and exec
                        self._instances[pid] = instance
        crashed, self._uncollected = ended.keys() & self._uncollected, set(ended)
        return sorted(Crash(self._instances.get(pid, "an unnamed model"), ended[pid]) for pid in crashed)

    def stopped(self, num_calls: int) -> list[str]:
        """Return the instances whose stub is stopped, by SIGSTOP or a debugger, now and at the last calls.

        Args:
            num_calls: The number of calls in a row, with this one; not a time, because the caller may be stopped too.
        """
        stopped = set()
        for pid in self._instances.keys() & _children(self._server_pid):  # a number may have a new owner
            with contextlib.suppress(OSError):
                if _read_stat(pid)[1][0] in ("T", "t"):
                    stopped.add(pid)
        self._num_stopped = {pid: self._num_stopped.get(pid, 0) + 1 for pid in stopped}
        return sorted(self._instances[pid] for pid, num in self._num_stopped.items() if num >= num_calls)

    def crashed_by_now(self) -> list[Crash]:
        """Return :meth:`crashed`, but look a second time at once if a stub has ended and is not collected yet."""
        crashed = self.crashed()
        if self._uncollected and not crashed:
            time.sleep(_COLLECTED_WITHIN_S)
            crashed = self.crashed()
        return crashed


def find_instance(command: Sequence[str]) -> str | None:
    """Return the model instance that a stub with this command line runs; None if it is not a stub's."""
    is_stub = len(command) > _INSTANCE_ARGUMENT and _STUB in command[0]
    return command[_INSTANCE_ARGUMENT] if is_stub else None


def end_orphans(region_prefix: str) -> None:
    """Kill this user's stubs whose server has ended, and wait for their end: until then they hold its shared memory.

    Args:
        region_prefix: How the names of their shared memory begin; others' stubs are left alone.
    """
    deadline = time.monotonic() + _END_S
    while (orphans := _orphans(region_prefix)) and time.monotonic() < deadline:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _read_stat(pid: int) -> tuple[str, list[str]]:
    """Return the name of a process, cut at 15 letters, and the fields after it in its line, the state first."""
    name, _, fields = (_PROC / str(pid) / "stat").read_text().partition("(")[2].rpartition(")")
    return name, fields.split()


def _orphans(region_prefix: str) -> list[int]:
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            command = (process / "cmdline").read_text(errors="replace").split("\0")
            if find_instance(command) is None or not command[_REGION_ARGUMENT].startswith(region_prefix):
                continue
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            # Not by its number in the command: a container numbers its processes anew.
            if process.stat().st_uid == os.geteuid() and (_PROC / parent / "comm").read_text().strip() != _SERVER:
                found.append(int(process.name))
    return found


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process; none if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found
