"""A gRPC server that speaks Triton's protocol over a real socket and answers what a test tells it to."""

# ruff: noqa: N802  (the methods are named as in the protocol)

from __future__ import annotations

import functools
import io
import json
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile
from carnelian_client import CarnelianClient, RetryPolicy
from carnelian_client.__main__ import main
from carnelian_client._audio import describe_audio, encode_audio, wav_from_samples
from carnelian_client._errors import about
from carnelian_client._retry import Deadline
from tritonclient.grpc import service_pb2, service_pb2_grpc

DEMO_CLIPS = Path(__file__).parents[2] / "demo" / "clips"
Answer = Callable[[Any, grpc.ServicerContext], dict[str, Any] | bytes]


def result(text: str = "a b") -> dict[str, Any]:
    """What `<model>_ctc` writes into RESULT."""
    words = [{"word": w, "start": float(i), "end": i + 0.5, "confidence": 0.9} for i, w in enumerate(text.split())]
    return {
        "text": text,
        "words": words,
        "confidence": 0.9,
        "duration": 1.5,
        "alternatives": [],
        "model": "m",
        "version": "1",
        "decoder": "greedy",
    }


class ScriptedTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers from `script` while there is any, then with `answer`: by default the clip's size in bytes."""

    def __init__(self) -> None:
        self.script: list[tuple[str, str] | Answer] = []
        self.answer: Answer = _say_size
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.left_s: list[float] = []
        """How much time each question had when it came, in seconds; none of these are requests to transcribe."""
        self.models: dict[str, str] = {"quartznet_demo": "READY", "other": "LOADING"}
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            step = self.script.pop(0) if self.script else self.answer
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            if isinstance(step, tuple):
                context.abort(grpc.StatusCode[step[0]], step[1])
            found = step(request, context)
            encoded = found if isinstance(found, bytes) else json.dumps(found).encode()
        finally:
            with self._lock:
                self.num_running -= 1
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        for name, value in (("TRANSCRIPT", b"not read"), ("RESULT", encoded)):
            answer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
            answer.raw_output_contents.append(struct.pack("<I", len(value)) + value)
        return answer

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.left_s.append(context.time_remaining())
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.left_s.append(context.time_remaining())
        return service_pb2.ServerReadyResponse(ready=all(s == "READY" for s in self.models.values()))

    def ServerMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.left_s.append(context.time_remaining())
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.left_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        return service_pb2.ModelReadyResponse(ready=self.models.get(request.name) == "READY")

    def RepositoryIndex(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.left_s.append(context.time_remaining())
        answer = service_pb2.RepositoryIndexResponse()
        for name, state in self.models.items():
            answer.models.add(name=name, version="1", state=state, reason="")
        return answer


def _say_size(request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
    return result(f"{len(request.raw_input_contents[0])} bytes")


class Endpoint:
    """A `ScriptedTriton` behind an address."""

    def __init__(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self.triton = ScriptedTriton()
        self._server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self.triton, self._server)
        port = (
            self._server.add_secure_port(address, credentials)
            if credentials
            else self._server.add_insecure_port(address)
        )
        self.url = f"{address.rsplit(':', 1)[0]}:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def start_endpoint() -> Iterator[Callable[..., Endpoint]]:
    running: list[Endpoint] = []

    def start(*args: Any, **kwargs: Any) -> Endpoint:
        running.append(Endpoint(*args, **kwargs))
        return running[-1]

    yield start
    for endpoint in running:
        endpoint.stop()


@pytest.fixture
def endpoint(start_endpoint: Callable[..., Endpoint]) -> Endpoint:
    return start_endpoint()


@pytest.fixture
def triton(endpoint: Endpoint) -> ScriptedTriton:
    return endpoint.triton


@pytest.fixture
def retry() -> RetryPolicy:
    """Attempts that follow one another at once."""
    return RetryPolicy(num_attempts=4, first_wait_s=0.01, longest_wait_s=0.02)


@pytest.fixture
def client(endpoint: Endpoint, retry: RetryPolicy) -> Iterator[CarnelianClient]:
    with CarnelianClient(endpoint.url, retry=retry, timeout_s=60) as client:
        yield client


@pytest.fixture
def make_result() -> Callable[[str], dict[str, Any]]:
    return result


@pytest.fixture
def answers() -> Callable[..., Answer]:
    """A step of a script: `answers("a b")` gives this text, after `delay_s`, with other fields `changed`."""

    def make(text: str, delay_s: float = 0, **changed: Any) -> Answer:
        def answer(request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
            time.sleep(delay_s)
            return result(text) | changed

        return answer

    return make


@pytest.fixture
def late(triton: ScriptedTriton) -> Iterator[Answer]:
    """A step of a script that gives no answer while the test lasts."""
    is_over = threading.Event()

    def answer(request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
        is_over.wait(timeout=60)
        return result("late")

    yield answer
    is_over.set()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Programs that the test starts heed SIGINT, which a shell has jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def wav() -> bytes:
    """Half a second of a tone, 16 kHz, 16 bit."""
    tone = 8000 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    return wav_from_samples(tone.astype(np.int16), 16000)


@pytest.fixture
def encode() -> Callable[[Any], bytes]:
    """Makes of audio what is sent, or the error that a client raises."""

    def encode(audio: Any) -> bytes:
        with about(describe_audio(audio)):
            return encode_audio(audio, Deadline(60.0))

    return encode


@pytest.fixture
def read() -> Callable[..., tuple[np.ndarray, int]]:
    """Reads a file's bytes: samples and their rate."""
    return lambda data, dtype="float32": soundfile.read(io.BytesIO(data), dtype=dtype)


def voice_of(name: str) -> Any:
    """[samples] int16: a clip of speech without the silence around it."""
    samples, rate = soundfile.read(DEMO_CLIPS / name, dtype="int16")
    assert (rate, samples.ndim) == (16_000, 1)
    loud = np.flatnonzero(np.abs(samples) > 1000)
    return samples[loud[0] : loud[-1]]


@pytest.fixture(scope="session")
def voices() -> list[Any]:
    """Two utterances, [samples] int16, 16 kHz."""
    return [voice_of("harbour.flac"), voice_of("letter.wav")]


@pytest.fixture(scope="session")
def talk(voices: list[Any]) -> Any:
    """[samples] int16, 16 kHz: two utterances with silence before, between and behind them."""
    silence = np.zeros(32_000, np.int16)
    return np.concatenate([silence, voices[0], silence, voices[1], silence])


@pytest.fixture(scope="session")
def spoken_s(voices: list[Any]) -> np.ndarray:
    """Where the voices of `talk` begin and end."""
    ends = np.cumsum([2, len(voices[0]) / 16_000, 2, len(voices[1]) / 16_000])
    return ends.reshape(2, 2)


@pytest.fixture
def says_how_long(triton: ScriptedTriton) -> None:
    """The server understands how long each clip is, in milliseconds."""

    def answer(request: Any, context: grpc.ServicerContext) -> dict[str, Any]:
        samples, rate = soundfile.read(io.BytesIO(request.raw_input_contents[0]))
        return result(f"{1000 * len(samples) / rate:.0f}")

    triton.answer = answer


@pytest.fixture
def transcribe(call: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `carnelian-transcribe` in this process."""
    return functools.partial(call, main)


@pytest.fixture
def clip(tmp_path: Path, wav: bytes) -> Path:
    path = tmp_path / "clip.wav"
    path.write_bytes(wav)
    return path
