"""Waits for processes to end, whatever interrupts, and describes how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

KILLED = "SIGKILL is what the kernel sends where memory has run out"


def has_ended(process: subprocess.Popen[str], timeout_s: float) -> bool:
    """Wait for a process. Not by `Popen.wait`: if a signal handler raises in it, its lock may stay taken."""
    deadline = time.monotonic() + timeout_s
    while process.returncode is None:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:  # already waited for, but an exception came before the status was stored
            pid, status = process.pid, 0
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            return False
        else:
            time.sleep(0.01)
    return True


class Crash(NamedTuple):
    """How the process of a model instance ended; as text, "demo_ctc_0_0 (SIGKILL)"."""

    instance: str
    status: int
    """The exit status, as `subprocess` gives it: the negative number of a signal if one ended the process."""

    def __str__(self) -> str:
        return f"{self.instance} ({f'status {self.status}' if self.status >= 0 else _name_signal(-self.status)})"


def describe_crash(crashes: Sequence[Crash]) -> str:
    """Say which instances have crashed."""
    crash = f"the process of {', '.join(map(str, crashes))} has crashed"
    if any(status == -signal.SIGKILL for _, status in crashes):
        crash += f"; {KILLED}"
    return crash


def describe_exit(status: int) -> str:
    """Describe how a process ended, from the return code that `subprocess` gives."""
    return f"ended with status {status}" if status >= 0 else f"was ended by {_name_signal(-status)}"


def _name_signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
