"""Clips of speech, and calls to the models of the session's server."""

import collections
import contextlib
import functools
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_client import CarnelianClient
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype

CLIPS = Path(__file__).parents[2] / "demo" / "clips"
RATE_HZ = 16_000
ANSWER_TIMEOUT_S = 60

Answer = dict[str, np.ndarray]


class Models:
    """Every model of a server, stages included, as a function of arrays."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self.client = client
        self._arrival = threading.Condition()

    def infer(
        self, model: str, *, parameters: Mapping[str, Any] | None = None, request_id: str = "", **tensors: np.ndarray
    ) -> Answer:
        """Sends one request and returns all outputs."""
        result = self.client.infer(
            model, _inputs(tensors), parameters=parameters, request_id=request_id, client_timeout=ANSWER_TIMEOUT_S
        )
        return _outputs(result)

    def infer_at_once(self, model: str, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Answer | Exception]:
        """Sends all requests before it takes an answer; returns answers or errors in the order of the requests."""
        answers: dict[int, Answer | Exception] = {}
        with self._arrival:
            for position, tensors in enumerate(requests):
                self.client.async_infer(model, _inputs(tensors), functools.partial(self._keep, answers, position))
            assert self._arrival.wait_for(lambda: len(answers) == len(requests), ANSWER_TIMEOUT_S)
        return [answers[position] for position in range(len(requests))]

    def batch_sizes(self, model: str) -> collections.Counter[int]:
        """Rows in a batch -> how many such batches the model has run since the server started."""
        (statistics,) = self.client.get_inference_statistics(model).model_stats
        return collections.Counter({batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats})

    def batch_sizes_of(self, model: str, num_rows: int, send: Callable[[], None]) -> collections.Counter[int]:
        """Rows in a batch -> how many such batches `send`, which sends so many rows, has made of them."""
        before = self.batch_sizes(model)
        send()
        deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
        while True:
            made = self.batch_sizes(model) - before
            if sum(size * count for size, count in made.items()) >= num_rows or time.monotonic() > deadline:
                return made
            time.sleep(0.02)

    def _keep(self, answers: dict[int, Any], position: int, result: Any, error: Exception | None) -> None:
        with self._arrival:
            answers[position] = error or _outputs(result)
            self._arrival.notify()


def _inputs(tensors: Mapping[str, np.ndarray]) -> list[triton.InferInput]:
    inputs = []
    for name, array in tensors.items():
        inputs.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _outputs(result: triton.InferResult) -> Answer:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[[str], Models]]:
    """Connects to the models of a server by its gRPC URL; the connections are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda url: Models(stack.enter_context(triton.InferenceServerClient(url)))


@pytest.fixture(scope="session")
def models(server: Any, connect: Callable[[str], Models]) -> Models:
    return connect(server.grpc_url)


@pytest.fixture(scope="session")
def sdk(server: Any) -> Iterator[CarnelianClient]:
    with CarnelianClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def encode() -> Callable[..., np.ndarray]:
    """Makes AUDIO [1, bytes] uint8, a file of samples."""

    def encode(
        samples: np.ndarray, rate_hz: int = RATE_HZ, container: str = "WAV", subtype: str = "PCM_16"
    ) -> np.ndarray:
        file = io.BytesIO()
        soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
        return np.frombuffer(file.getvalue(), np.uint8)[None]

    return encode


@pytest.fixture(scope="session")
def clip_files() -> dict[str, np.ndarray]:
    """Name -> AUDIO [1, bytes] uint8 of the demo's clips, one for each container, codec, rate or channel count."""
    paths = sorted(path for path in CLIPS.iterdir() if path.suffix != ".jsonl")
    return {path.name: np.fromfile(path, np.uint8)[None] for path in paths}


@pytest.fixture(scope="session")
def signals(models: Models, clip_files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name -> [samples] float32 at 16 kHz of the demo's clips, as the server decodes them: 3.6 s to 5.2 s."""
    return {name: models.infer("audio_decode", AUDIO=file)["SIGNAL"][0] for name, file in clip_files.items()}
