"""Triton's gRPC protocol, and the only module that imports tritonclient.

It uses only the generated messages and stubs of tritonclient. Its client classes would bring a second way to
build each request, errors that keep the status as text, and a destructor that can hang when Python ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
import tenacity  # noqa: F401  # not in the first call: if that is interrupted there, what is half imported stays so
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ._answers import MAX_ANSWER_BYTES, error_from_answer
from ._errors import CarnelianClientError, ServerError, TransportError, about
from ._result import check_result, transcript_from_result
from ._settings import OWN_ADDRESS
from ._threads import outside_main_thread
from ._types import TLS, Health, Model, Request, Transcript

if TYPE_CHECKING:
    from ._retry import Deadline

Metadata = Sequence[tuple[str, str]]
T = TypeVar("T")

_CHANNEL_OPTIONS = (
    # A name that resolves to several pods: take them in turn. The default stays with the first one for ever.
    ("grpc.lb_policy_name", "round_robin"),
    # Reconnect at the pace of the retries: between its own attempts gRPC answers every call with the last refusal, by
    # default for a second at first and for 120 s in the end. A process's channels to one address share the wait.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # In spite of its name, the time that one attempt to connect may take; 20 s by default.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Look a name up again when a connection ends, as servers end them to show new pods: by default every 30 s at most.
    ("grpc.dns_min_time_between_resolutions_ms", 5000),
    # A connection that the network has dropped without a word, as NAT does with idle ones, is given up when what was
    # sent is not acknowledged in 20 s: without keepalive, calls fail on it for 15 minutes. Its pings themselves must be
    # rarer than every 5 minutes, or the server ends the connection.
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
)
LINGER_S = 30.0
"""How long a transcription may still wait for its answer when its caller has stopped waiting, in seconds. Triton (2.51
at least) ends with a segmentation fault, within seconds, if a few clients cancel calls or let them expire while they
run (triton-inference-server/server#7368). So a call that nobody waits for is left to end by itself."""
CLOCKS_S = 0.05
"""How far gRPC's clock may be from Python's when a call ends at its deadline, in seconds."""
SETTLE_S = 0.1
"""The time in seconds that gRPC gets to tell the event loop which calls were ended by closing the channel. If it finds
the loop closed, it logs an error for each of these calls, in the next loop."""


class Transport:
    """A blocking channel to one server; threads may share it."""

    def __init__(self, url: str, credentials: grpc.ChannelCredentials | None, metadata: Metadata) -> None:
        self._metadata = metadata
        self._channel = _open_channel(grpc, url, credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_closed = False
        self._in_flight: set[Any] = set()  # a call that nobody refers to is cancelled
        self._pid: int | None = None

    def infer(self, request: Request, deadline: Deadline) -> Transcript:
        """Transcribe one clip, in one attempt.

        Raises:
            CarnelianClientError: the answer was an error, or there was none; as in the methods below.
        """
        with about(request.clip, request.model, request.request_id):
            message = _infer_message(request, deadline)
            return _transcript(self._in_grpc(lambda: self._answer(message, deadline)))

    def is_model_ready(self, model: str, deadline: Deadline) -> bool:
        """Ask whether a model can be called now."""
        answer = self._call("ModelReady", service_pb2.ModelReadyRequest(name=model), deadline)
        return bool(answer.ready)

    def health(self, deadline: Deadline) -> Health:
        """Ask for the state and the version of the server."""
        live = self._call("ServerLive", service_pb2.ServerLiveRequest(), deadline)
        ready = self._call("ServerReady", service_pb2.ServerReadyRequest(), deadline)
        metadata = self._call("ServerMetadata", service_pb2.ServerMetadataRequest(), deadline)
        return Health(live.live, ready.ready, metadata.version)

    def models(self, deadline: Deadline) -> tuple[Model, ...]:
        """List the models of the repository, stages of ensembles included."""
        return _models(self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest(), deadline))

    def close(self) -> None:
        """Close the connection; calls in flight end with an error."""
        self._is_closed = True
        if self._is_forked:  # gRPC would wait for threads that are not in this process
            return
        # A thread closes it, because Ctrl-C does not reach threads: within gRPC's close, it would leave the channel
        # half closed, and the channel's destructor, like any later close, would wait for ever.
        closing = threading.Thread(target=self._channel.close)
        if sys.is_finalizing():  # before 3.12, a thread would never run then, and never be ready
            self._channel.close()
            return
        try:
            closing.start()
        except RuntimeError:  # in 3.12.0 and 3.12.1, no thread starts where `atexit` calls
            self._channel.close()
        else:
            closing.join()

    def _answer(self, message: Any, deadline: Deadline) -> Any:
        with self._translated_errors(deadline, message.id):
            if threading.current_thread() is threading.main_thread():  # no other has started, and `future` needs one
                return self._stub.ModelInfer(message, timeout=deadline.left_s, metadata=self._metadata)
            call = self._stub.ModelInfer.future(message, timeout=deadline.left_s + LINGER_S, metadata=self._metadata)
            self._in_flight.add(call)
            call.add_done_callback(self._in_flight.discard)
            # Not by `result(timeout=...)`: it counts by the clock on the wall, which may be set.
            has_ended = threading.Event()
            call.add_done_callback(lambda _: has_ended.set())
            if not has_ended.wait(min(deadline.left_s, threading.TIMEOUT_MAX)):
                raise _late(deadline)
            return call.result()

    def _call(self, method: str, message: Any, deadline: Deadline) -> Any:
        def call() -> Any:
            with self._translated_errors(deadline):
                return getattr(self._stub, method)(message, timeout=deadline.left_s, metadata=self._metadata)

        return self._in_grpc(call)

    @property
    def _is_forked(self) -> bool:
        return self._pid not in (None, os.getpid())

    def _in_grpc(self, function: Callable[[], T]) -> T:
        """Call gRPC where no handler of a signal can raise, and in the process of the first call alone."""
        if self._is_forked:
            raise RuntimeError(
                "the client belongs to the process of its first call, and this is one that was forked later; close the "
                "client before the fork, or start processes by spawn, and make a new one in each."
            )
        self._pid = os.getpid()
        return outside_main_thread(function)

    @contextlib.contextmanager
    def _translated_errors(self, deadline: Deadline, request_id: str = "") -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if self._is_closed and error.code() is grpc.StatusCode.CANCELLED:
                raise _closed() from error
            raise _error(error, deadline, request_id) from error
        except ValueError as error:  # the channel was closed between two attempts
            if not self._is_closed:
                raise
            raise _closed() from error


class AsyncTransport:
    """An asyncio channel with the methods of `Transport`; it belongs to the event loop in which it is made."""

    def __init__(self, url: str, credentials: grpc.ChannelCredentials | None, metadata: Metadata) -> None:
        self._metadata = metadata
        self._channel = _open_channel(grpc.aio, url, credentials)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_closed = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    async def infer(self, request: Request, deadline: Deadline) -> Transcript:
        """Transcribe one clip, in one attempt; see `Transport.infer`."""
        with about(request.clip, request.model, request.request_id):
            message = _infer_message(request, deadline)
            call = asyncio.create_task(self._call("ModelInfer", message, deadline, linger_s=LINGER_S))
            self._in_flight.add(call)
            call.add_done_callback(self._forget)
            await asyncio.wait({call}, timeout=deadline.left_s)  # it leaves the call running if this task is cancelled
            if not call.done():
                raise _late(deadline)
            return _transcript(call.result())

    async def is_model_ready(self, model: str, deadline: Deadline) -> bool:
        """Ask whether a model can be called now."""
        answer = await self._call("ModelReady", service_pb2.ModelReadyRequest(name=model), deadline)
        return bool(answer.ready)

    async def health(self, deadline: Deadline) -> Health:
        """Ask for the state and the version of the server."""
        live = await self._call("ServerLive", service_pb2.ServerLiveRequest(), deadline)
        ready = await self._call("ServerReady", service_pb2.ServerReadyRequest(), deadline)
        metadata = await self._call("ServerMetadata", service_pb2.ServerMetadataRequest(), deadline)
        return Health(live.live, ready.ready, metadata.version)

    async def models(self, deadline: Deadline) -> tuple[Model, ...]:
        """List the models of the repository, stages of ensembles included."""
        return _models(await self._call("RepositoryIndex", service_pb2.RepositoryIndexRequest(), deadline))

    async def close(self) -> None:
        """Close the connection; calls in flight end with an error."""
        self._is_closed = True
        unfinished = [call for call in self._in_flight if not call.done()]
        await self._channel.close()
        if unfinished:
            await asyncio.gather(*unfinished, return_exceptions=True)
            await asyncio.sleep(SETTLE_S)

    def _forget(self, call: asyncio.Task[Any]) -> None:
        self._in_flight.discard(call)
        if not call.cancelled():
            call.exception()  # otherwise asyncio warns of an exception that nobody has asked for

    async def _call(self, method: str, message: Any, deadline: Deadline, linger_s: float = 0.0) -> Any:
        call = getattr(self._stub, method)
        try:
            return await call(message, timeout=deadline.left_s + linger_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error, deadline, getattr(message, "id", "")) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            # A channel that is closed cancels its calls, which would look as if their tasks had been cancelled.
            if not self._is_closed or _is_cancelled(asyncio.current_task()):
                raise
            raise _closed() from error


def _open_channel(api: ModuleType, url: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """Open a channel of `grpc` or of `grpc.aio`."""
    # gRPC would use the proxy of the environment even for this machine's own address.
    options = (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if OWN_ADDRESS.fullmatch(url) else _CHANNEL_OPTIONS
    if credentials is None:
        return api.insecure_channel(url, options=options)
    return api.secure_channel(url, credentials, options=options)


def read_credentials(tls: TLS | None) -> grpc.ChannelCredentials | None:
    """Read the files, and check them: gRPC takes an empty one for none, and trusts its own authorities.

    Raises:
        ValueError: one is no PEM, or the key is not that of the certificate.
        OSError: one cannot be read.
    """
    if tls is None:
        return None
    ca, key, cert = (  # first, for OpenSSL does not name a file that it cannot read
        None if path is None else Path(path).read_bytes() for path in (tls.ca_path, tls.key_path, tls.cert_path)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # gRPC decides how strong a key has to be
    try:
        if tls.ca_path is not None:
            context.load_verify_locations(tls.ca_path)
    except ssl.SSLError as error:
        raise ValueError(f"`ca_path` must be a PEM file of certificates, but {tls.ca_path} is none: {error}") from error
    try:
        if tls.cert_path is not None:
            # OpenSSL would ask the terminal for a password.
            context.load_cert_chain(tls.cert_path, tls.key_path, password=lambda: "")
    except ssl.SSLError as error:
        raise ValueError(
            "`cert_path` and `key_path` must be PEM files that belong together, the key without a password, but "
            f"{tls.cert_path} and {tls.key_path} are not: {error}"
        ) from error
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _infer_message(request: Request, deadline: Deadline) -> service_pb2.ModelInferRequest:
    """Build the request of one clip: AUDIO is UINT8 [1, bytes]. No outputs are listed, which means all of them."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    message.inputs.add(name="AUDIO", datatype="UINT8", shape=[1, len(request.audio)])
    message.raw_input_contents.append(request.audio)
    # In microseconds: Triton drops a request that has waited longer in a queue (where the model's policy allows it).
    message.parameters["timeout"].int64_param = round(deadline.left_s * 1e6)
    for name, value in request.parameters.items():
        if isinstance(value, str):
            message.parameters[name].string_param = value
        else:
            message.parameters[name].int64_param = value
    return message


def _transcript(answer: service_pb2.ModelInferResponse) -> Transcript:
    names = [output.name for output in answer.outputs]
    try:
        encoded = answer.raw_output_contents[names.index("RESULT")]
        (size,) = struct.unpack_from("<I", encoded)  # BYTES tensors have a length before each element
        raw = json.loads(encoded[4 : 4 + size])
        if "error" in raw:
            raise error_from_answer(None, raw["error"])
        check_result(raw)
        return transcript_from_result(raw, answer.id)
    except CarnelianClientError:  # some are also ValueErrors
        raise
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error) as error:
        raise ServerError(
            "the answer must hold RESULT, a JSON object as model_repository/result.schema.json has it, "
            f"but its outputs are {names} ({type(error).__name__}: {error}); "
            "is this a model of Carnelian, of this version?"
        ) from error


def _models(answer: service_pb2.RepositoryIndexResponse) -> tuple[Model, ...]:
    return tuple(Model(m.name, m.version, m.state == "READY", m.state, m.reason) for m in answer.models)


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    """Whether somebody has cancelled the task itself. Before Python 3.11, which cannot tell, it is always False."""
    return task is not None and sys.version_info >= (3, 11) and task.cancelling() > 0


def _closed() -> TransportError:
    return TransportError("the client was closed before the answer came")


def _error(error: grpc.RpcError, deadline: Deadline, request_id: str) -> CarnelianClientError:
    # Each error that a call raises is also a grpc.Call, with code and details, which the base class does not say.
    status, details = error.code().name, error.details() or ""
    details = details.replace(f"[request id: {request_id}]", "")  # its words, the caller's, mean nothing
    is_own = status == "DEADLINE_EXCEEDED" and deadline.left_s < CLOCKS_S  # a gateway's deadline is shorter
    return _late(deadline) if is_own else error_from_answer(status, details)


def _late(deadline: Deadline) -> CarnelianClientError:
    return error_from_answer("DEADLINE_EXCEEDED", f"no answer within {deadline.timeout_s:g} s")
