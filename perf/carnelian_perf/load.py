"""Closed-loop load on a running server: so many clients, each of which sends its next clip once it has an answer."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tritonclient import grpc

from carnelian_perf.graph import PROCESSED_FRAMES
from carnelian_perf.traffic import Clip

REQUEST_TIMEOUT_S = 120.0
TRITON_TYPES = {"uint8": "UINT8", "float32": "FP32", "int32": "INT32"}

T = TypeVar("T")


class LoadError(RuntimeError):
    """The server did not answer a request; the message says what it said instead."""


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    clip: int
    latency_s: float
    transcript: str
    processed_frames: float


@dataclass(frozen=True)
class StageStatistics:
    """What a stage has executed since the server started."""

    batches: dict[int, int]
    """Batch size -> executions."""
    compute_s: float

    def since(self, earlier: "StageStatistics") -> "StageStatistics":
        """What was executed after `earlier`."""
        batches = {size: count - earlier.batches.get(size, 0) for size, count in self.batches.items()}
        return StageStatistics(
            {size: count for size, count in sorted(batches.items()) if count}, self.compute_s - earlier.compute_s
        )


def read_statistics(client: Any, model: str) -> StageStatistics:
    """Ask the server for a stage's batch statistics."""
    (stage,) = client.get_inference_statistics(model).model_stats
    return StageStatistics(
        {batch.batch_size: batch.compute_infer.count for batch in stage.batch_stats},
        sum(batch.compute_infer.ns for batch in stage.batch_stats) / 1e9,
    )


def drive(
    client: Any, model: str, clips: Sequence[Clip], order: Sequence[int], concurrency: int
) -> tuple[list[Answer], float]:
    """Send clips in an order, `concurrency` at a time.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`; threads share it.
        model: The ensemble that takes an audio file.
        clips: What there is to send.
        order: Indices into `clips`, one for each request.
        concurrency: Clients.

    Returns:
        The answers, and the seconds from the first request to the last answer.

    Raises:
        LoadError: a request failed; no more were sent after it.
    """
    return send_all(lambda index: _send(client, model, clips[index], index), order, concurrency)


def send_all(send: Callable[[int], T], order: Sequence[int], concurrency: int) -> tuple[list[T], float]:
    """Call `send` with each entry of an order, `concurrency` at a time.

    Returns:
        What it gave, and the seconds from the first call to the last return. No more are called after one that raised.
    """
    pending, lock, failed = iter(order), threading.Lock(), threading.Event()

    def take() -> Iterator[int]:
        while not failed.is_set():
            with lock:
                index = next(pending, None)
            if index is None:
                return
            yield index

    def work() -> list[T]:
        try:
            return [send(index) for index in take()]
        except BaseException:
            failed.set()
            raise

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        workers = [pool.submit(work) for _ in range(concurrency)]
        answers = [answer for worker in workers for answer in worker.result()]
    return answers, time.perf_counter() - started


def ask(
    client: Any, model: str, inputs: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str], of_what: str
) -> tuple[Any, float]:
    """Send one request.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`.
        model: Whose inputs and outputs these are.
        inputs: By name.
        outputs: Names of those wanted.
        of_what: What was sent, for the error.

    Returns:
        The client's answer, and the seconds that it took.

    Raises:
        LoadError: There was no answer.
    """
    tensors = []
    for name, array in inputs.items():
        tensors.append(grpc.InferInput(name, array.shape, TRITON_TYPES[array.dtype.name]))
        tensors[-1].set_data_from_numpy(array)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs]
    started = time.perf_counter()
    try:
        result = client.infer(model, tensors, outputs=wanted, client_timeout=REQUEST_TIMEOUT_S)
    except grpc.InferenceServerException as error:
        raise LoadError(f"{model} must answer every clip, but said of {of_what}: {error.message()}") from error
    return result, time.perf_counter() - started


def ask_file(client: Any, model: str, clip: Clip, outputs: Sequence[str], of_what: str) -> tuple[Any, float]:
    """Send one clip as a file, as :func:`ask` does."""
    return ask(client, model, {"AUDIO": np.frombuffer(clip.wav, np.uint8)[np.newaxis]}, outputs, of_what)


def _send(client: Any, model: str, clip: Clip, index: int) -> Answer:
    result, latency_s = ask_file(
        client, model, clip, ("TRANSCRIPT", PROCESSED_FRAMES), f"clip {index} ({clip.duration_s:.1f} s)"
    )
    transcript = result.as_numpy("TRANSCRIPT").item().decode()
    return Answer(index, latency_s, transcript, float(result.as_numpy(PROCESSED_FRAMES).item()))
