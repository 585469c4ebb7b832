"""How processes end: waited for whatever interrupts, and told in words."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

KILLED = "SIGKILL is what the kernel sends where memory has run out"


def has_ended(process: subprocess.Popen[str], timeout_s: float) -> bool:
    """Wait for a process; not by `Popen.wait`, whose lock stays taken where a signal's exception came behind it."""
    deadline = time.monotonic() + timeout_s
    while process.returncode is None:
        try:
            pid, status = os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:  # it has been waited for, and the exception came before its status was kept
            pid, status = process.pid, 0
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            return False
        else:
            time.sleep(0.01)
    return True


class Crash(NamedTuple):
    """The end of the process of a model instance: "demo_ctc_0_0 (SIGKILL)"."""

    instance: str
    status: int
    """As `subprocess` gives it: below 0 for a signal."""

    def __str__(self) -> str:
        return f"{self.instance} ({f'status {self.status}' if self.status >= 0 else _name_signal(-self.status)})"


def describe_crash(crashes: Sequence[Crash]) -> str:
    """Say which instances have crashed."""
    crash = f"the process of {', '.join(map(str, crashes))} has crashed"
    if any(status == -signal.SIGKILL for _, status in crashes):
        crash += f"; {KILLED}"
    return crash


def describe_exit(status: int) -> str:
    """Say how a process ended whose return code `subprocess` gives as `status`."""
    return f"ended with status {status}" if status >= 0 else f"was ended by {_name_signal(-status)}"


def _name_signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
