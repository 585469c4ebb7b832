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
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

from carnelian_serving.endings import Crash

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_COLLECTED_WITHIN_S = 0.1  # Triton collects a stub in this time if it ended it itself
_MODEL_ARGUMENT = 1  # of the stub's command line: the path of its Python file, in a folder of model and version
_REGION_ARGUMENT = 2  # the name of its shared memory
_INSTANCE_ARGUMENT = 8  # the name of the model instance
_EXIT_FIELD = 49  # of /proc/PID/stat, after the name: the status as `waitpid` gives it
_SERVER = "tritonserver"
_END_S = 1.0


class _Stub(NamedTuple):
    path: Path
    instance: str
    """The model's own name if it is a helper, which reads the configuration before there are instances."""


class StubWatch:
    """Finds the instances of a server whose stub has crashed or is stopped."""

    def __init__(self, server_pid: int) -> None:
        """Watch the children of a server.

        Args:
            server_pid: Process id of `tritonserver`.
        """
        self._server_pid = server_pid
        self._stubs: dict[int, _Stub] = {}
        self._uncollected: set[int] = set()
        self._num_stopped: dict[int, int] = {}
        self._loaded: set[int] = set()
        self._is_ok: Callable[[str], bool] | None = None
        self._on_failed_load: Callable[[Crash], None] | None = None
        self._told: set[int] = set()

    @property
    def num_instances(self) -> int:
        """The number of stubs that run; Triton also starts some for a moment, to read configurations."""
        return sum((_PROC / str(pid)).exists() for pid in self._stubs)

    def spare_loads(self, is_ok: Callable[[str], bool], on_failed: Callable[[Crash], None]) -> None:
        """From now on, let :meth:`crashed` leave out stubs of models that are still to be loaded.

        Those are stubs of versions that are not ready, helpers, and stubs that ended before they were seen running.
        Readiness does not tell what the last were to load: while a model is loaded anew, its old version is ready.

        Args:
            is_ok: Whether the server answers OK on a path, as `/v2/models/demo/versions/1/ready`. It is not asked about
                the stubs that run now.
            on_failed: Called once with each crash that is left out.
        """
        self.crashed()  # or a stub that has just started would be missing
        self._loaded = set(self._stubs)
        self._is_ok, self._on_failed_load = is_ok, on_failed

    def crashed(self) -> list[Crash]:
        """Return the instances whose stub has ended and is uncollected, now and at the last call.

        Those that it unloads Triton collects in between.
        """
        ended = {}
        # A number may be used again.
        self._stubs = {pid: stub for pid, stub in self._stubs.items() if (_PROC / str(pid)).exists()}
        self._loaded &= self._stubs.keys()
        for pid in _children(self._server_pid):
            with contextlib.suppress(OSError):
                name, fields = _read_stat(pid)
                if fields[0] == "Z":
                    # A server that is crashing has other children too, which look up the symbols of its stack.
                    if pid in self._stubs or _STUB.startswith(name):
                        ended[pid] = os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
                elif pid not in self._stubs:
                    command = (_PROC / str(pid) / "cmdline").read_text(errors="surrogateescape").split("\0")
                    instance = find_instance(command)
                    if instance is not None:  # None: between fork and exec
                        self._stubs[pid] = _Stub(Path(command[_MODEL_ARGUMENT]), instance)
        uncollected, self._uncollected = ended.keys() & self._uncollected, set(ended)
        self._told &= uncollected
        crashes = []
        for pid in uncollected - self._told:
            stub = self._stubs.get(pid)
            crash = Crash(stub.instance if stub else "an unnamed model", ended[pid])
            if self._was_loaded(pid, ended):
                crashes.append(crash)
            elif self._on_failed_load is not None:
                self._told.add(pid)
                self._on_failed_load(crash)
        return sorted(crashes)

    def _was_loaded(self, pid: int, ended: Container[int]) -> bool:
        """Whether an ended stub counts as an instance of a model that is loaded."""
        if self._is_ok is None or pid in self._loaded:
            return True
        if (stub := self._stubs.get(pid)) is None:
            return False
        model, version = stub.path.parts[-3:-1]
        # Until a version is loaded anew, its old instance serves.
        is_replaced = any(other == stub for key, other in self._stubs.items() if key not in ended)
        return (
            stub.instance != model and not is_replaced and self._is_ok(f"/v2/models/{model}/versions/{version}/ready")
        )

    def stopped(self, num_calls: int) -> list[str]:
        """Return the instances whose stub is stopped, by SIGSTOP or a debugger, now and at the last calls.

        Args:
            num_calls: The number of calls in a row, with this one; not a time, because the caller may be stopped too.
        """
        stopped = set()
        for pid in self._stubs.keys() & _children(self._server_pid):  # a number may have a new owner
            with contextlib.suppress(OSError):
                if _read_stat(pid)[1][0] in ("T", "t"):
                    stopped.add(pid)
        self._num_stopped = {pid: self._num_stopped.get(pid, 0) + 1 for pid in stopped}
        return sorted(self._stubs[pid].instance for pid, num in self._num_stopped.items() if num >= num_calls)

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
