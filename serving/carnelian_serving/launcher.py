"""Starts `tritonserver` on a model repository, waits until it answers, and leaves nothing behind.

`with Server("model_repository", http_port=0, grpc_port=0, metrics_port=0) as server: ...`
"""

from __future__ import annotations

import contextlib
import http
import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from carnelian_serving import METRICS_VARIABLE, THREADS_VARIABLE
from carnelian_serving.addresses import choose_ports, find_address, read_addresses
from carnelian_serving.certificates import check_certificates
from carnelian_serving.endings import KILLED, Crash, describe_crash, describe_exit, has_ended
from carnelian_serving.environment import FEW_THREADS, KEPT_MEMORY, QUIET
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import Installation, find_installation
from carnelian_serving.limits import raised_limits
from carnelian_serving.repository import check_repository, is_plain, resolve_repository, served_path
from carnelian_serving.server_log import ServerLog
from carnelian_serving.shared_memory import (
    REGIONS,
    Regions,
    check_room,
    describe_shortage,
    find_free_bytes,
    remove_leftovers,
)
from carnelian_serving.startup_log import find_reasons, is_noise
from carnelian_serving.stubs import StubWatch, end_orphans
from carnelian_serving.triton_options import by_name, check_options, has_port, is_on, trim_key

LogLevel = Literal["error", "warning", "info", "verbose"]

EXIT_MARGIN_S = 5.0
"""Triton ends by itself after its --exit-timeout-secs; it is killed this much later."""

STUB_CHECK_INTERVAL_S = 1.0
STOPPED_CHECKS = 30
"""How often in succession a stub may be seen stopped, for a debugger to look at it. Meanwhile its instance answers
every request with "Stub process ... is not healthy", and the server calls itself ready."""
UNCOLLECTED_WHILE_LOADING_S = 5.0
"""How long an ended stub may stay uncollected while models load before it counts as crashed: Triton ends some itself,
and collects them when it gets a core. From when it was first seen, for the whole machine may have stood still."""
KILLED_WITHIN_S = 30.0
"""Of a process that the kernel holds, as amid input and output, the end comes late."""
FAILED_WHILE_LOADING_S = 30.0
"""How long Triton may take to end, the other models being loaded, once an instance of one could not be: it may hang."""
CRASH_END_S = 5.0
"""After a signal of its own tritonserver writes its stack and ends; where memory is damaged it may wait for ever."""
STUB_END_S = 1.0
"""Processes that were killed are gone before; those that nobody collects never are."""

_LOG_OPTIONS: dict[str, tuple[str, ...]] = {
    "error": ("--log-info=false", "--log-warning=false"),
    "warning": ("--log-info=false",),
    "info": (),
    "verbose": ("--log-verbose=1",),
}


class Server:
    """A running `tritonserver`; a context manager whose body runs once every model is ready."""

    def __init__(
        self,
        repository: str | Path,
        *,
        models: Sequence[str] = (),
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        threads: int | None = None,
        log_level: LogLevel = "warning",
        ready_timeout_s: float = 180.0,
        exit_timeout_s: int = 30,
        triton_options: Sequence[str] = (),
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        """Describe a server; `start` starts it.

        Args:
            repository: The folder of model folders.
            models: Load these only, and what an ensemble among them is composed of; all when empty.
            host: The address to listen on.
            http_port: 0 takes any free port, here and below.
            grpc_port: What the SDK talks to.
            metrics_port: Prometheus metrics.
            threads: Threads of each ONNX Runtime and DALI instance, over what the configs say.
            log_level: What of Triton's log reaches `on_log`.
            ready_timeout_s: How long loading may take.
            exit_timeout_s: How long what the models are at when the server is stopped may take.
            triton_options: Further options of `tritonserver`, as they are.
            on_log: Called with each line of the log, from another thread, until it raises; what comes too fast is
                left out. None keeps the log in memory only.

        Raises:
            ServerError: The repository's path leads nowhere.
        """
        self.repository = resolve_repository(Path(repository))
        """The model repository that is served."""
        self._models = tuple(models)
        self._host = host
        self._addresses: dict[str, str] = {}
        self._wanted_ports = {"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port}
        self._ports: dict[str, int] = {}
        self._threads = threads
        self._log_level: LogLevel = log_level
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._triton_options = tuple(triton_options)
        self._new_log = partial(ServerLog, on_log, with_noise=log_level == "verbose")
        self._log = self._new_log()
        self._process: subprocess.Popen[str] | None = None
        self._scratch: Path | None = None
        self._stubs: StubWatch | None = None
        self._regions = Regions()

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC endpoint."""
        return self._url("grpc")

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP endpoint."""
        return self._url("http")

    @property
    def metrics_url(self) -> str:
        """The address that Prometheus scrapes."""
        return f"http://{self._url('metrics')}/metrics"

    @property
    def pid(self) -> int:
        """Process id of `tritonserver`."""
        return self._running().pid

    @property
    def shared_memory_bytes(self) -> int:
        """What the server's Python-based instances hold of /dev/shm."""
        return self._regions.num_bytes

    @property
    def log(self) -> list[str]:
        """The last lines of the server's log."""
        return self._log.lines

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return once it is ready.

        Raises:
            InstallationError: There is no whole Triton.
            ServerError: The repository, a port, a certificate, /dev/shm or a model is at fault.
        """
        self._log = self._new_log()
        check_repository(self.repository, self._models)
        check_options(self._triton_options)
        self._host = find_address(self._host)
        self._addresses = read_addresses(self._host, self._triton_options)
        self._ports = choose_ports(self._host, self._wanted_ports)
        check_certificates(self._triton_options)
        # The stubs lie in here.
        folder = None if is_plain(tempfile.gettempdir()) else "/tmp"
        self._scratch = Path(tempfile.mkdtemp(prefix=self._regions.prefix, dir=folder))
        try:
            installation = find_installation(self._scratch)
            end_orphans(REGIONS)
            remove_leftovers(self._scratch.parent)
            if not installation.is_native:
                check_room(find_free_bytes())
            self._launch(installation, served_path(self.repository, self._models, self._scratch), self._scratch)
            self._wait_until_ready()
            if not installation.is_native and self._stubs is not None:
                room_bytes = find_free_bytes() + self.shared_memory_bytes
                if shortage := describe_shortage(room_bytes, self._stubs.num_instances):
                    self._log.tell(f"carnelian-serve: {shortage}")
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Block until the server ends by itself and return its exit status.

        Raises:
            ServerError: A model instance has crashed or stands still. Triton does not start it again, so the server
                must be.
        """
        process = self._running()
        while True:
            try:
                return process.wait(STUB_CHECK_INTERVAL_S)
            except subprocess.TimeoutExpired:
                self._regions.close_to_others()  # those of models that are loaded later, if `triton_options` let them
                if self._log.crash_signal is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(CRASH_END_S)
                    process.kill()
                    process.wait()
                    return -self._log.crash_signal
                if crashed := self._crashed_instances():
                    raise ServerError(
                        f"every model instance must be alive, but {describe_crash(crashed)}. Triton does not start it "
                        "again; start carnelian-serve anew"
                    ) from None
                if stopped := self._stopped_instances():
                    raise ServerError(
                        f"every model instance must be running, but the process of {', '.join(stopped)} stands still, "
                        "as SIGSTOP or a debugger stops it, and its requests fail; start carnelian-serve anew"
                    ) from None

    def stop(self) -> None:
        """Ask the server to end; kill what does not, or at once where this is interrupted. May be called again.

        Triton finishes what its models are at. What has stages of an ensemble before it is answered with UNAVAILABLE.
        """
        try:
            if self._process is not None:
                self._end(self._process)
        finally:
            self._log.close()
            self._regions.remove()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None

    def _end(self, process: subprocess.Popen[str]) -> None:
        try:
            # Triton waits for an instance that crashed or stands still in vain, and for as long as it can.
            is_lost = self._stubs is not None and bool(self._stubs.crashed_by_now() or self._stopped_instances())
            timeout_s = 0.0 if is_lost else self._exit_timeout_s + EXIT_MARGIN_S
            process.terminate()
            if not has_ended(process, timeout_s) and not is_lost:
                self._log.tell(
                    f"carnelian-serve: tritonserver was killed {timeout_s:g} s after it was asked to end; what its "
                    "models were at is lost (`--exit-timeout` gives them longer)"
                )
        finally:  # who interrupts the waiting waits no longer
            process.kill()
            has_ended(process, KILLED_WITHIN_S)
            # Stubs share the server's process group; none outlives it, or makes shared memory after it.
            deadline = time.monotonic() + STUB_END_S
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.01)
            self._process = None  # not before, so that a second call goes on where this one is interrupted

    def _crashed_instances(self) -> list[Crash]:
        return [] if self._stubs is None else self._stubs.crashed()

    def _stopped_instances(self) -> list[str]:
        return [] if self._stubs is None else self._stubs.stopped(STOPPED_CHECKS)

    def _url(self, kind: str) -> str:
        if not self._ports:
            raise ServerError("the server must be started first")
        host, port = self._addresses[kind], self._ports[f"--{kind}-port"]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ServerError("the server must be started first")
        return self._process

    def _launch(self, installation: Installation, repository: Path, scratch: Path) -> None:
        environment = {**KEPT_MEMORY, **FEW_THREADS, **QUIET, **os.environ, **installation.environment}
        environment["TMPDIR"] = str(scratch)  # DALI's files, which a killed stub leaves
        if has_port("metrics", self._triton_options):  # else another server may have the port
            environment[METRICS_VARIABLE] = self.metrics_url
        if self._threads is not None:
            environment[THREADS_VARIABLE] = str(self._threads)
        command = self._command(installation, repository)
        # A launcher that is killed takes the server with it. The signal is bound to the *thread* that starts
        # the server, so it is asked for only where that thread lives as long as the process. A preexec_fn would
        # ask without a program of its own, but it makes Python fork, and in a process with open gRPC channels
        # one fork in a hundred crashes before the server is there (https://github.com/grpc/grpc/issues/43055).
        setpriv = shutil.which("setpriv", path=os.defpath)
        if setpriv is not None and threading.current_thread() is threading.main_thread():
            command = [setpriv, "--pdeathsig=TERM", *command]
        with raised_limits():
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=self._regions.claim(),
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
            )
        self._stubs = StubWatch(self._process.pid)
        assert self._process.stdout is not None
        # Of what stands for the repository, and goes with the scratch folder, nobody knows.
        self._log.follow(self._process.stdout, lambda line: line.replace(str(repository), str(self.repository)))

    def _command(self, installation: Installation, repository: Path) -> list[str]:
        is_ipv6 = ":" in self._host  # of which Triton's servers have a spelling each
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--http-address={'ipv6:' * is_ipv6}{self._host}",
            f"--grpc-address={f'[{self._host}]' if is_ipv6 else self._host}",
            f"--metrics-address={'ipv6:' * is_ipv6}{self._host}",
            *(f"{option}={port}" for option, port in self._ports.items()),
            f"--backend-config=python,shm-region-prefix-name={self._regions.prefix}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            *_LOG_OPTIONS[self._log_level],
        ]
        if installation.backend_directory is not None:
            command.append(f"--backend-directory={installation.backend_directory}")
        elif self._threads is not None:
            # Natively the count belongs to one pool for all models; DALI keeps its config's `num_threads`.
            command.append("--backend-config=onnxruntime,enable-global-threadpool=1")
            command.append(f"--backend-config=onnxruntime,intra_op_thread_count={self._threads}")
        return [*command, *map(trim_key, self._triton_options)]

    def _wait_until_ready(self) -> None:
        process = self._running()
        deadline = time.monotonic() + self._ready_timeout_s
        crashed_at: float | None = None
        failed_at: float | None = None
        must_load = is_on(by_name(self._triton_options).get("--exit-on-error", "true"))
        while True:
            crashed = self._crashed_instances()
            crashed_at = (crashed_at or time.monotonic()) if crashed else None
            is_ready = self._is_ready()
            self._regions.close_to_others()
            if process.poll() is not None:  # whoever answered, it was another server
                self._log.close()
                raise ServerError(self._explain_exit(process.returncode, crashed))
            if is_ready:
                return
            if crashed_at is not None and time.monotonic() > crashed_at + UNCOLLECTED_WHILE_LOADING_S:
                raise ServerError(f"every model must load, but {describe_crash(crashed)}")
            if must_load and self._log.has_failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > min(deadline, failed_at + FAILED_WHILE_LOADING_S):
                    reasons = "\n  ".join(find_reasons(self.log))
                    raise ServerError(f"every model must load, but one cannot, and tritonserver hangs:\n  {reasons}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the models of {self.repository} must be ready within {self._ready_timeout_s:g} s, but "
                    "are not; allow more (`--start-timeout`, `ready_timeout_s`), as where TensorRT "
                    "builds engines; last lines of the log:\n" + "\n".join(self._last_lines() or ["(none)"])
                )
            time.sleep(0.05)

    def _last_lines(self) -> list[str]:
        return [line for line in self.log if not is_noise(line)][-10:]

    def _is_ready(self) -> bool:
        """Whether the models are, and every port is open: that of the metrics is the last."""
        # Not urllib, which would ask a proxy for this machine's own address.
        connection = http.client.HTTPConnection(self._addresses["http"], self._ports["--http-port"], timeout=1)
        try:
            if has_port("metrics", self._triton_options):
                socket.create_connection((self._addresses["metrics"], self._ports["--metrics-port"]), 1).close()
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _explain_exit(self, status: int, crashed: Sequence[Crash]) -> str:
        found = find_reasons(self.log)
        reasons = found or ["last lines of its log:", *self._last_lines()]
        if status == -signal.SIGKILL:
            reasons = [KILLED, *reasons]
        elif status < 0 and not found:
            reasons = ["a model's process may have been killed, as where memory has run out", *reasons]
        if by_force := [crash for crash in crashed if crash.status != 0]:
            reasons = [describe_crash(by_force), *reasons]
        logs = [option for option in self._triton_options if option.startswith("--log-file=")]
        reasons += [f"its log is in {option.partition('=')[2]}" for option in logs]
        return f"tritonserver {describe_exit(status)} before it was ready:\n  " + "\n  ".join(reasons)
