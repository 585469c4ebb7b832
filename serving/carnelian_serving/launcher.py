"""Starts `tritonserver` on a model repository, waits until it answers, and leaves nothing behind.

`with Server("model_repository", http_port=0, grpc_port=0, metrics_port=0) as server: ...`
"""

from __future__ import annotations

import http
import http.client
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from carnelian_serving import METRICS_VARIABLE, THREADS_VARIABLE
from carnelian_serving.addresses import find_address, first_on, held_ports, open_to_others, read_addresses
from carnelian_serving.certificates import check_certificates
from carnelian_serving.endings import Crash, describe_crash
from carnelian_serving.environment import FEW_THREADS, KEPT_MEMORY, QUIET, STUB_PRELUDE, VERTEX_AI_PREFIX
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import Installation, find_installation
from carnelian_serving.limits import OUT_OF_THREADS
from carnelian_serving.repository import check_repository, find_repository, is_plain, served_path
from carnelian_serving.shared_memory import (
    REGIONS,
    check_room,
    describe_shortage,
    find_free_bytes,
    remove_leftovers,
)
from carnelian_serving.startup_log import find_reasons
from carnelian_serving.stubs import end_orphans
from carnelian_serving.triton_options import (
    by_name,
    check_options,
    close_shared_memory,
    has_port,
    is_on,
    trim_key,
)
from carnelian_serving.triton_process import TOLD_TOGETHER_S, TritonProcess

LogLevel = Literal["error", "warning", "info", "verbose"]

UNCOLLECTED_WHILE_LOADING_S = 5.0
"""How long a stub that ended may stay uncollected while models load before it counts as crashed. Triton ends some stubs
itself, and collects them when it gets a core. The time counts from when the ended stub was first seen, because the
whole machine may have stood still."""
FAILED_WHILE_LOADING_S = 30.0
"""How long Triton may take to end after an instance of a model failed to load. It loads the other models first, and may
then hang."""

_LOG_OPTIONS: dict[LogLevel, tuple[str, ...]] = {
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
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Describe a server; `start` starts it.

        Args:
            repository: The folder of model folders.
            models: Load these only, and what an ensemble among them is composed of; all when empty.
            host: The address to listen on.
            http_port: 0 takes any free port, here and below.
            grpc_port: What the SDK talks to.
            metrics_port: Prometheus metrics.
            threads: Threads of each ONNX Runtime and DALI instance, in place of those of the configs.
            log_level: Which lines of Triton's log reach `on_log`.
            ready_timeout_s: How long loading may take.
            exit_timeout_s: How long running stages may take when the server is stopped.
            triton_options: Further options of `tritonserver`, passed on unchanged.
            on_log: Called with each line of the log, from another thread, until it raises. Lines that come too fast
                are left out. None keeps the log in memory only.
            sleep: Called with seconds to pass, again and again, while the server starts and in `wait`. What it raises
                ends them, and stops a server that has not started yet.

        Raises:
            StrayWordError: An option of `tritonserver` does not begin with `--`.
            ServerError: An option must not be there, or the working directory was removed.
        """
        check_options(triton_options)
        self.repository = find_repository(Path(repository))
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
        self._sleep = sleep
        self._new_triton = partial(TritonProcess, on_log, with_noise=log_level == "verbose")
        self._triton = self._new_triton()
        self._scratch: Path | None = None

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
        """The process id of `tritonserver`."""
        return self._triton.pid

    @property
    def shared_memory_bytes(self) -> int:
        """The bytes of /dev/shm that the server's Python-based instances hold."""
        return self._triton.regions.num_bytes

    @property
    def log(self) -> list[str]:
        """The last lines of the server's log."""
        return self._triton.log.lines

    def __repr__(self) -> str:
        state = f"at {self.grpc_url}" if self._triton.is_running else "not running"
        return f"<Server of {self.repository}, {state}>"

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
            InstallationError: Triton is not installed, or a part of it is missing.
            ServerError: The server runs already; or the repository, a port, a certificate, /dev/shm or a model is at
                fault.
        """
        if self._triton.is_running:
            raise ServerError("the server must be stopped before it is started again")
        self._triton = self._new_triton()
        check_repository(self.repository, self._models)
        self._host = find_address(self._host)
        self._addresses = read_addresses(self._host, self._triton_options)
        with held_ports(self._host, self._wanted_ports) as self._ports, first_on(self._host, self._ports):
            check_certificates(self._triton_options)
            end_orphans(REGIONS)
            remove_leftovers()  # before room is needed, which they may take
            # The stubs are started from in here.
            folder = None if is_plain(tempfile.gettempdir()) else "/tmp"
            self._scratch = Path(tempfile.mkdtemp(prefix=self._triton.regions.prefix, dir=folder))
            self._start(self._scratch)

    def _start(self, scratch: Path) -> None:
        try:
            installation = find_installation(scratch)
            if not installation.is_native:
                check_room(find_free_bytes())
            self._launch(installation, served_path(self.repository, self._models, scratch), scratch)
            self._wait_until_ready()
            self._triton.spare_loads()
            if not installation.is_native:
                room_bytes = find_free_bytes() + self.shared_memory_bytes
                if shortage := describe_shortage(room_bytes, self._triton.stubs.num_instances):
                    self._triton.log.tell(f"carnelian-serve: {shortage}")
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Block until the server ends by itself and return its exit status.

        Raises:
            ServerError: A model instance has crashed or is stopped. Triton does not start it again, so the server must
                be restarted.
        """
        return self._triton.wait(self._sleep)

    def stop(self) -> None:
        """Ask the server to end; kill what does not end in time, or everything at once if this is interrupted.

        Triton finishes the stages that are running. Requests with further stages of an ensemble before them are
        answered with UNAVAILABLE. May be called again.
        """
        try:
            self._triton.end(self._exit_timeout_s)
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None

    def _url(self, kind: str) -> str:
        if not self._ports:
            raise ServerError("the server must be started first")
        host, port = self._addresses[kind], self._ports[f"--{kind}-port"]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _launch(self, installation: Installation, repository: Path, scratch: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(VERTEX_AI_PREFIX)}
        environment = {**KEPT_MEMORY, **FEW_THREADS, **QUIET, **inherited, **installation.environment}
        environment["TMPDIR"] = str(scratch)  # DALI writes files there, which a killed stub leaves
        prelude = scratch / "prelude.sh"
        prelude.write_text(STUB_PRELUDE)
        environment["BASH_ENV"] = str(prelude)
        if has_port("metrics", self._triton_options):  # else another server may have the port
            environment[METRICS_VARIABLE] = self.metrics_url
        if self._threads is not None:
            environment[THREADS_VARIABLE] = str(self._threads)
        # The log must name the repository, not the links in the scratch folder that may stand for it.
        self._triton.start(
            self._command(installation, repository),
            environment,
            rewrite=lambda line: line.replace(str(repository), str(self.repository)),
        )

    def _command(self, installation: Installation, repository: Path) -> list[str]:
        is_ipv6 = ":" in self._host  # Triton's HTTP and gRPC servers spell it differently
        command = [
            str(installation.binary),
            f"--model-repository={repository}",
            f"--http-address={'ipv6:' * is_ipv6}{self._host}",
            f"--grpc-address={f'[{self._host}]' if is_ipv6 else self._host}",
            f"--metrics-address={'ipv6:' * is_ipv6}{self._host}",
            *(f"{option}={port}" for option, port in self._ports.items()),
            f"--backend-config=python,shm-region-prefix-name={self._triton.regions.prefix}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            *_LOG_OPTIONS[self._log_level],
        ]
        if installation.backend_directory is not None:
            command.append(f"--backend-directory={installation.backend_directory}")
        elif self._threads is not None:
            # Natively the count belongs to one pool for all models; DALI keeps its config's `num_threads`.
            command.append("--backend-config=onnxruntime,enable-global-threadpool=1")
            command.append(f"--backend-config=onnxruntime,intra_op_thread_count={self._threads}")
        command += close_shared_memory(open_to_others(self._host, self._triton_options), self._triton_options)
        return [*command, *map(trim_key, self._triton_options)]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        crashed_at: float | None = None
        failed_at: float | None = None
        options = by_name(self._triton_options)
        ends_without = is_on(options.get("--exit-on-error", "true"))
        must_load = ends_without or is_on(options.get("--strict-readiness", "true"))
        while True:
            crashed = self._triton.stubs.crashed()
            crashed_at = (crashed_at or time.monotonic()) if crashed else None
            is_ready = self._is_ready()
            if self._triton.poll() is not None:  # then another server answered on the port
                self._sleep(TOLD_TOGETHER_S)
                raise ServerError(self._explain_exit(crashed))
            if is_ready:
                return
            if crashed_at is not None and time.monotonic() > crashed_at + UNCOLLECTED_WHILE_LOADING_S:
                raise ServerError(f"every model must load, but {describe_crash(crashed)}")
            if must_load and self._triton.log.has_failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > min(deadline, failed_at + FAILED_WHILE_LOADING_S):
                    state = (
                        "and tritonserver hangs"
                        if ends_without
                        else "and tritonserver is ready without it only with `--strict-readiness=false`"
                    )
                    reasons = "\n  ".join(find_reasons(self.log))
                    raise ServerError(f"every model must load, but one cannot, {state}:\n  {reasons}")
            if time.monotonic() > deadline:
                advice = (
                    "allow more (`--start-timeout`, `ready_timeout_s`), as where TensorRT builds engines; or "
                    "tritonserver waits for a thread that it may not have (`pids.max`, `ulimit -u`)"
                )
                causes = [*find_reasons(self.log), OUT_OF_THREADS if self._triton.was_refused_threads else advice]
                raise ServerError(
                    f"the models of {self.repository} must be ready within {self._ready_timeout_s:g} s, but are not; "
                    f"{'; '.join(causes)}; last lines of the log:\n"
                    + "\n".join(self._triton.last_lines() or ["(none)"])
                )
            self._sleep(0.05)

    def _is_ready(self) -> bool:
        """Whether the models are ready, and every port is open: the one of the metrics opens last."""
        try:
            if has_port("metrics", self._triton_options):
                socket.create_connection((self._addresses["metrics"], self._ports["--metrics-port"]), 1).close()
        except OSError:
            return False
        # Not urllib.request: it would go through a proxy even to this machine's own address.
        connection = http.client.HTTPConnection(self._addresses["http"], self._ports["--http-port"], timeout=1)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _explain_exit(self, crashed: Sequence[Crash]) -> str:
        reasons = self._triton.explain_exit(crashed)
        log_file = by_name(self._triton_options).get("--log-file")
        return f"{reasons}\n  its log is in {log_file}" if log_file else reasons
