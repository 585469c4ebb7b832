"""A process of `tritonserver` with its models' processes, its log and its shared memory, until all of them are gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from carnelian_serving.endings import KILLED, Crash, describe_crash, describe_exit, has_ended
from carnelian_serving.errors import ServerError
from carnelian_serving.limits import OUT_OF_THREADS, num_refused_threads, raised_limits
from carnelian_serving.server_log import ServerLog
from carnelian_serving.shared_memory import Regions
from carnelian_serving.startup_log import find_reasons, is_noise
from carnelian_serving.stubs import StubWatch

EXIT_MARGIN_S = 5.0
"""How long after its --exit-timeout-secs, when Triton should have ended by itself, it is killed."""

STUB_CHECK_INTERVAL_S = 1.0
TOLD_TOGETHER_S = 0.1
"""How long after its end to listen whether the caller is told to end as well, as by what signals a whole tree."""
STOPPED_CHECKS = 30
"""How many times in a row a stub may be seen stopped, so that a debugger may stop it for a moment. Meanwhile its
instance answers every request with "Stub process ... is not healthy", although the server calls itself ready."""
KILLED_WITHIN_S = 30.0
"""How long to wait for the end of killed processes: the kernel may hold one, for example during input and output."""
TOLD_END_S = 5.0
"""How long tritonserver may take to end after its log told of it. With damaged memory, after a crash, it may never end;
nor may it after a start that failed, because its threads are still there while its memory is cleaned up."""
STUB_END_S = 1.0
"""How long to wait for killed processes to be gone; those that nobody collects never are."""


class TritonProcess:
    """One run of `tritonserver`: it can be started once."""

    def __init__(self, on_log: Callable[[str], None] | None, *, with_noise: bool) -> None:
        """Prepare its log and the name of its shared memory.

        Args:
            on_log: Called with each line of its log, from another thread, until it raises.
            with_noise: Whether lines that say nothing are among them.
        """
        self.log = ServerLog(on_log, with_noise=with_noise)
        self.regions = Regions()
        """The shared memory of its Python-based instances."""
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._num_refused_before = 0

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and not ended by :meth:`end`."""
        return self._process is not None and not self._is_over

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            ServerError: The process does not run.
        """
        if not self.is_running:
            raise ServerError("the server must be started first")
        return self._started().pid

    @cached_property
    def stubs(self) -> StubWatch:
        """The processes of its Python-based model instances."""
        return StubWatch(self._started().pid)

    @property
    def was_refused_threads(self) -> bool:
        """Whether a thread or process was refused since the start. It need not say so, and may wait for it for ever."""
        return num_refused_threads() > self._num_refused_before

    def start(self, command: Sequence[str], environment: Mapping[str, str], rewrite: Callable[[str], str]) -> None:
        """Start the process.

        Args:
            command: Its program and arguments.
            environment: All of its variables. `TMPDIR` is a folder of its own, named as its regions are.
            rewrite: What is kept of each line of its log.

        Raises:
            ServerError: /dev/shm cannot be written to, or no process or thread can be had.
        """
        # A launcher that is killed takes the server with it. The signal is bound to the *thread* that starts
        # the server, so it is asked for only where that thread lives as long as the process. A preexec_fn would
        # ask without a program of its own, but it makes Python fork, and in a process with open gRPC channels
        # one fork in a hundred crashes before the server is there (https://github.com/grpc/grpc/issues/43055).
        setpriv = shutil.which("setpriv", path=os.defpath)
        if setpriv is not None and threading.current_thread() is threading.main_thread():
            command = [setpriv, "--pdeathsig=TERM", *command]
        self._num_refused_before = num_refused_threads()
        claimed = self.regions.claim(environment["TMPDIR"])
        try:
            with raised_limits():
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    pass_fds=claimed,
                    start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
                )
            assert self._process.stdout is not None
            self.log.follow(self._process.stdout, rewrite)
        except (BlockingIOError, RuntimeError) as error:  # of a process, and of a thread
            if self._process is not None and self._process.stdout is not None:
                self._process.stdout.close()
            raise ServerError(f"processes and threads must be able to start, but not here: {OUT_OF_THREADS}") from error

    def spare_loads(self) -> None:
        """Let the server go on from now on where a model that it loads in addition crashes."""
        self.stubs.spare_loads(
            lambda crash: self.log.tell(
                f"carnelian-serve: a model that is loaded while others serve must load, but {describe_crash([crash])}; "
                "the others go on. Until carnelian-serve is started anew, tritonserver might not load any more"
            ),
        )

    def poll(self) -> int | None:
        """Return the exit status, as `subprocess` gives it, or None while the process runs.

        A process whose log says that it crashed, or that it could not start, but that hangs instead of ending, is
        killed; its status is the one that it would have had.
        """
        self.regions.close_to_others()  # also those of models that are loaded later, if the options allow it
        process = self._started()
        if self.log.end_status is not None and not has_ended(process, TOLD_END_S):
            process.kill()
            if has_ended(process, KILLED_WITHIN_S):
                process.returncode = self.log.end_status
        return process.poll()

    def wait(self, sleep: Callable[[float], object]) -> int:
        """Block until the process ends by itself and return its exit status.

        Args:
            sleep: Called with the seconds between two looks at the process. What it raises ends the waiting.

        Raises:
            ServerError: A model instance has crashed or stands still. Triton does not start it again, so the server
                must be.
        """
        while (status := self.poll()) is None:
            if crashed := self.stubs.crashed():
                raise ServerError(
                    f"every model instance must be alive, but {describe_crash(crashed)}. Triton does not start it "
                    "again; start carnelian-serve anew"
                )
            if stopped := self.stubs.stopped(STOPPED_CHECKS):
                raise ServerError(
                    f"every model instance must be running, but the process of {', '.join(stopped)} stands still, "
                    "as SIGSTOP or a debugger stops it, and its requests fail; start carnelian-serve anew"
                )
            sleep(STUB_CHECK_INTERVAL_S)
        sleep(TOLD_TOGETHER_S)
        return status

    def end(self, exit_timeout_s: float) -> None:
        """Ask the server to end; kill what does not end in time, or everything at once if this is interrupted.

        May be called again.

        Args:
            exit_timeout_s: How long Triton waits for what its models are at.
        """
        try:
            if self.is_running:
                self._end(self._started(), exit_timeout_s)
        finally:
            self.log.close()
            self.regions.remove()

    def last_lines(self) -> list[str]:
        """Return the last ten lines of the log, without those that say nothing."""
        return [line for line in self.log.lines if not is_noise(line)][-10:]

    def explain_exit(self, crashed: Sequence[Crash]) -> str:
        """Say why the server ended before it was ready, as far as its log says so.

        Args:
            crashed: The instances that had crashed before.
        """
        self.log.close()
        status = self._started().returncode
        found = find_reasons(self.log.lines)
        reasons = found or ["last lines of its log:", *self.last_lines()]
        if status == -signal.SIGKILL:
            reasons = [KILLED, *reasons]
        elif status < 0 and not found:
            reasons = [
                "the machine may have paused a second, its clock have jumped, or a model's process been killed, as "
                "where memory has run out",
                *reasons,
            ]
        if by_force := [crash for crash in crashed if crash.status != 0]:
            reasons = [describe_crash(by_force), *reasons]
        return f"tritonserver {describe_exit(status)} before it was ready:\n  " + "\n  ".join(reasons)

    def _end(self, process: subprocess.Popen[str], exit_timeout_s: float) -> None:
        try:
            # Triton would wait for a crashed or stopped instance, in vain, for as long as it may.
            is_lost = bool(self.stubs.crashed_by_now() or self.stubs.stopped(STOPPED_CHECKS))
            timeout_s = 0.0 if is_lost else exit_timeout_s + EXIT_MARGIN_S
            process.terminate()
            if not has_ended(process, timeout_s) and not is_lost:
                self.log.tell(
                    f"carnelian-serve: tritonserver was killed {timeout_s:g} s after it was asked to end; what its "
                    "models were at is lost (`--exit-timeout` gives them longer)"
                )
        finally:  # also if the waiting is interrupted
            process.kill()
            has_ended(process, KILLED_WITHIN_S)
            # Stubs share the server's process group: none must outlive it, or make shared memory after it.
            deadline = time.monotonic() + STUB_END_S
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.01)
            self._is_over = True  # only now, so that a second call goes on if this one is interrupted

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ServerError("the server must be started first")
        return self._process
