"""Watches the stub processes in which tritonserver runs Python-based models.

Triton 2.51 does not start a stub again that has crashed: it stays a zombie, its instance answers every
request with "Stub process ... is not healthy", and the server goes on calling itself ready. A stub that crashes while
its model loads into a server that serves others is another matter: they go on, and so should the server. Nor do all
stubs end whose server is killed: one that was about to take its next message, as while models load, waits for it for
ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from carnelian_serving.endings import Crash

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_COLLECTED_WITHIN_S = 0.1  # Triton collects a stub in this time if it ended it itself
_REGION_ARGUMENT = 2  # of the stub's command line: the name of its shared memory
_INSTANCE_ARGUMENT = 8  # the name of the model instance
_EXIT_FIELD = 49  # of /proc/PID/stat, after the name: the status as `waitpid` gives it
_SERVER = "tritonserver"
_MOST_BYTES = 2**16
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
        self._on_failed_load: Callable[[Crash], None] | None = None
        self._told: set[int] = set()

    @property
    def num_instances(self) -> int:
        """The number of stubs that run; Triton also starts some for a moment, to read configurations."""
        return sum((_PROC / str(pid)).exists() for pid in self._instances)

    def spare_loads(self, on_failed: Callable[[Crash], None]) -> None:
        """From now on, let :meth:`crashed` leave out stubs whose instance is still to be loaded.

        Args:
            on_failed: Called once with each crash that is left out.
        """
        self.crashed()  # or `num_instances` would lack a stub that has just started
        self._on_failed_load = on_failed

    def crashed(self) -> list[Crash]:
        """Return the instances whose stub has ended and is uncollected, now and at the last call.

        Those that it unloads Triton collects in between.
        """
        ended = {}
        # A number may be used again.
        self._instances = {pid: name for pid, name in self._instances.items() if (_PROC / str(pid)).exists()}
        threads = _children(self._server_pid)
        for pid in threads:
            with contextlib.suppress(OSError):
                name, fields = _read_stat(pid)
                if fields[0] == "Z":
                    # A server that is crashing has other children too, which look up the symbols of its stack.
                    if pid in self._instances or _STUB.startswith(name):
                        ended[pid] = os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
                elif pid not in self._instances:
                    command = _read(f"{_PROC}/{pid}/cmdline").split("\0")
                    instance = find_instance(command)
                    if instance is not None:  # None: between fork and exec
                        self._instances[pid] = instance
        uncollected, self._uncollected = ended.keys() & self._uncollected, set(ended)
        self._told &= uncollected
        crashes = []
        for pid in uncollected:
            crash = Crash(self._instances.get(pid, "an unnamed model"), ended[pid])
            # Triton loads each instance in a thread of its own. Once it is loaded, this ends, and the kernel hands its
            # children to the main thread. Readiness would not tell: while a model is loaded anew, the old one is ready.
            if threads[pid] == self._server_pid or self._on_failed_load is None:
                crashes.append(crash)
            elif pid not in self._told:
                self._told.add(pid)
                self._on_failed_load(crash)
        return sorted(crashes)

    def stopped(self, num_calls: int) -> list[str]:
        """Return the instances whose stub is stopped, by SIGSTOP or a debugger, now and at the last calls.

        Args:
            num_calls: The number of calls in a row, with this one; not a time, because the caller may be stopped too.
        """
        stopped = set()
        for pid in self._instances:
            with contextlib.suppress(OSError):
                state, parent = _read_stat(pid)[1][:2]
                if state in ("T", "t") and parent == str(self._server_pid):  # a number may have a new owner
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
    name, _, fields = _read(f"{_PROC}/{pid}/stat").partition("(")[2].rpartition(")")
    return name, fields.split()


def _orphans(region_prefix: str) -> list[int]:
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            command = (process / "cmdline").read_text(errors="replace").split("\0")
            if find_instance(command) is None or not command[_REGION_ARGUMENT].startswith(region_prefix):
                continue
            _, (_, parent, *_) = _read_stat(int(process.name))
            # Not by its number in the command: a container numbers its processes anew.
            if process.stat().st_uid == os.geteuid() and (_PROC / parent / "comm").read_text().strip() != _SERVER:
                found.append(int(process.name))
    return found


def _children(pid: int) -> dict[int, int]:
    """Return the children of a process, each with its thread there; none if the kernel does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.scandir(_PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                found.update(dict.fromkeys(map(int, _read(f"{task.path}/children").split()), int(task.name)))
    return found


def _read(path: str) -> str:
    """Return what a file says. `Path.read_text` takes four times as long, and a server has hundreds of threads."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.fsdecode(os.read(file, _MOST_BYTES))
    finally:
        os.close(file)
