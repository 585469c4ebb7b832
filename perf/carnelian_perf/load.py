"""Requests to a running server: one alone, or many by several clients, each of which waits for its answer."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype

from carnelian_perf.clips import WavClip

REQUEST_TIMEOUT_S = 120.0

T = TypeVar("T")
Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""The inputs of a request: name -> array."""


class LoadError(RuntimeError):
    """The server did not answer a request; the message says what it said instead."""


def send_all(send: Callable[[int], T], order: Sequence[int], concurrency: int) -> tuple[list[T], float]:
    """Call `send` with each entry of an order, `concurrency` at a time.

    Returns:
        The results, grouped by thread, and the seconds from the first call to the last return. After a call that
        raises, no more calls are made.
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
        try:
            workers = [pool.submit(work) for _ in range(concurrency)]
            answers = [answer for worker in workers for answer in worker.result()]
        except BaseException:  # also Ctrl-C: the pool would first send all that is left
            failed.set()
            raise
    return answers, time.perf_counter() - started


def ask(client: Any, model: str, inputs: Inputs, outputs: Sequence[str], of_what: str) -> tuple[Any, float]:
    """Send one request.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`.
        model: Name of the model.
        inputs: The model's inputs, by name.
        outputs: Names of the outputs to ask for.
        of_what: What is sent, in words, for the error message.

    Returns:
        The client's answer, and the seconds that it took.

    Raises:
        LoadError: The server answered with an error, or not in time.
    """
    tensors = make_tensors(inputs)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs]
    started = time.perf_counter()
    try:
        result = client.infer(model, tensors, outputs=wanted, client_timeout=REQUEST_TIMEOUT_S)
    except grpc.InferenceServerException as error:
        raise LoadError(f"{model} must answer every clip, but said of {of_what}: {error.message()}") from error
    return result, time.perf_counter() - started


def file_inputs(file: bytes) -> Inputs:
    """Make the inputs of `<model>` from one clip as a file."""
    return {"AUDIO": np.frombuffer(file, np.uint8)[np.newaxis]}


def pcm_inputs(signals: npt.NDArray[np.float32]) -> Inputs:
    """Make the inputs of `<model>_pcm` from clips of one length, [rows, samples]."""
    return {"SIGNAL": signals, "SIGNAL_LENGTH": np.full((len(signals), 1), signals.shape[1], np.int32)}


def make_tensors(inputs: Inputs) -> list[Any]:
    """Convert inputs to the `InferInput` tensors that the client sends."""
    tensors = []
    for name, array in inputs.items():
        tensors.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def ask_clip(
    client: Any, model: str, clips: Sequence[WavClip], index: int, outputs: Sequence[str]
) -> tuple[Any, float]:
    """Send one of the clips as a file, as :func:`ask` does."""
    clip = clips[index]
    return ask(client, model, file_inputs(clip.wav), outputs, f"clip {index} ({clip.duration_s:.1f} s)")
