"""How processes end: waited for whatever interrupts, and told in words."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence


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


def describe_crash(instances: Sequence[str]) -> str:
    """Say which instances have crashed, as :class:`carnelian_serving.stubs.StubWatch` names them."""
    crash = f"the process of {', '.join(instances)} has crashed"
    if any(signal.SIGKILL.name in instance for instance in instances):
        crash += "; SIGKILL is what the kernel sends where memory has run out"
    return crash


def describe_exit(status: int) -> str:
    """Say how a process ended whose return code `subprocess` gives as `status`."""
    return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
