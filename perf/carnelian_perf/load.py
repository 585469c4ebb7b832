"""Closed-loop load on a running server: a number of clients, each of which sends its next clip once it has an answer.

The module also reads what the server's stages did meanwhile, from Triton's own statistics.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype

from carnelian_perf.clips import WavClip
from carnelian_perf.raw_file import Split

REQUEST_TIMEOUT_S = 120.0
POLL_S = 0.005
"""Seconds between two questions for the statistics, which take time of the server."""
SETTLED_S = 0.05
"""Seconds without a new count after which a stage has counted all its requests: up to 4 ms on two busy cores."""
SETTLING_S = 1.0
"""The longest wait for the counts to stand still, in seconds; on a server that others use, they never do."""
NUM_CONNECTIONS = 16
"""Number of connections to an address that check whether one server answers them all. If two servers share them evenly,
all reach the same one with a probability of 1 in 30,000."""
PROCESSED_FRAMES = "PROCESSED_FRAMES"
"""An output of the acoustic graphs of :mod:`carnelian_perf.traffic.graph`, float32 [rows, 1]: the frames that the first
convolution processed for the batch, divided equally among its rows. The sum over all clips is the work done, padding
included, whatever batches were formed."""
ANSWERED = ("TRANSCRIPT", PROCESSED_FRAMES)
"""The outputs that an :class:`Answer` is made of."""

T = TypeVar("T")
Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""The inputs of a request: name -> array."""


class LoadError(RuntimeError):
    """The server did not answer a request; the message says what it said instead."""


@dataclass(frozen=True)
class Answer:
    """The server's answer to one request for :data:`ANSWERED`."""

    clip: int
    latency_s: float
    transcript: str
    processed_frames: float

    @classmethod
    def of(cls, clip: int, latency_s: float, result: Any) -> "Answer":
        """Read the client's answer."""
        transcript, frames = (result.as_numpy(name).item() for name in ANSWERED)
        return cls(clip, latency_s, transcript.decode(), float(frames))


@dataclass(frozen=True)
class Work:
    """A number of requests, or of executions, of a stage and the time that they took in all."""

    count: int
    spent_ns: tuple[int, int, int, int]
    """Total nanoseconds in queue, input, infer and output."""

    def since(self, earlier: "Work") -> "Work":
        """Return what was added since the `earlier` reading."""
        spent_ns = tuple(now - before for now, before in zip(self.spent_ns, earlier.spent_ns, strict=True))
        return Work(self.count - earlier.count, spent_ns)  # type: ignore[arg-type]

    def mean(self) -> Split:
        """Return the mean of one request or execution, rounded to a tenth of a microsecond; `count` must not be 0."""
        return Split(*(round(spent_ns / self.count / 1e6, 4) for spent_ns in self.spent_ns))


NOTHING = Work(0, (0, 0, 0, 0))


@dataclass(frozen=True)
class StageStatistics:
    """What a stage has done since the server started, or between two readings."""

    requests: Work
    """The requests that were answered; each counts the whole time of the batch that it was in."""
    executions: dict[int, Work]
    """Batch size -> executions, ascending. Their queue time is 0: requests wait in a queue, batches do not."""
    answered_ns: int
    """Nanoseconds from arrival to answer, summed over requests; for an ensemble, with the time between its stages."""

    @property
    def batches(self) -> dict[int, int]:
        """Batch size -> number of executions."""
        return {size: work.count for size, work in self.executions.items()}

    @property
    def compute_s(self) -> float:
        """The time that all executions together spent in `infer`, in seconds."""
        return sum(work.spent_ns[2] for work in self.executions.values()) / 1e9

    def since(self, earlier: "StageStatistics") -> "StageStatistics":
        """Return the statistics of what was done since the `earlier` reading."""
        executions = {size: work.since(earlier.executions.get(size, NOTHING)) for size, work in self.executions.items()}
        done = {size: work for size, work in executions.items() if work.count}
        return StageStatistics(self.requests.since(earlier.requests), done, self.answered_ns - earlier.answered_ns)


def read_statistics(client: Any, model: str) -> StageStatistics:
    """Read Triton's statistics of a stage or an ensemble from the server.

    Raises:
        LoadError: The server does not give them.
    """
    (stage,) = _ask_statistics(client, model).model_stats

    def work(count: int, queue_ns: int, parts: Any) -> Work:
        return Work(count, (queue_ns, parts.compute_input.ns, parts.compute_infer.ns, parts.compute_output.ns))

    found, batches = stage.inference_stats, sorted(stage.batch_stats, key=lambda batch: batch.batch_size)
    return StageStatistics(
        work(found.success.count, found.queue.ns, found),
        {batch.batch_size: work(batch.compute_infer.count, 0, batch) for batch in batches},
        found.success.ns,
    )


def is_one_server(url: str, model: str) -> bool:
    """Check whether new connections to an address all reach one server: several would each have their own statistics.

    Args:
        url: host:port of the gRPC endpoint.
        model: A model that has answered requests. On one server, its number of requests either grows from reading to
            reading or stays the same together with the time of the last request.

    Raises:
        LoadError: The server does not give its statistics.
    """
    seen: list[tuple[int, int]] = []
    for _ in range(NUM_CONNECTIONS):
        # By default, channels to one address share a connection.
        with grpc.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)]) as client:
            (stage,) = _ask_statistics(client, model).model_stats
        seen.append((stage.inference_stats.success.count, stage.last_inference))
    return all(before[0] < after[0] or before == after for before, after in pairwise(seen))


def await_statistics(client: Any, model: str, before: StageStatistics, num_requests: int = 1) -> StageStatistics:
    """Read a stage's statistics until they have `num_requests` more than `before`: Triton answers first, then counts.

    Raises:
        LoadError: The requests are not counted within :data:`REQUEST_TIMEOUT_S`.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while time.monotonic() < deadline:
        if (now := read_statistics(client, model)).requests.count >= before.requests.count + num_requests:
            return now
        time.sleep(POLL_S)
    raise LoadError(f"{model} must count the requests that it answers, but has not in {REQUEST_TIMEOUT_S:g} s")


def settle_statistics(client: Any, models: Sequence[str]) -> dict[str, StageStatistics]:
    """Read the statistics of stages once their counts stand still, for when the number of requests is not known.

    Returns:
        The statistics by stage; if others use the server, those after :data:`SETTLING_S`.

    Raises:
        LoadError: The server does not give its statistics.
    """
    deadline = time.monotonic() + SETTLING_S
    now = {model: read_statistics(client, model) for model in models}
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        before, now = now, {model: read_statistics(client, model) for model in models}
        if now == before:
            break
    return now


def _ask_statistics(client: Any, model: str) -> Any:
    try:
        return client.get_inference_statistics(model)
    except grpc.InferenceServerException as error:
        raise LoadError(f"the server must tell what {model} has done, but says: {error.message()}") from error


def drive(
    client: Any, model: str, clips: Sequence[WavClip], order: Sequence[int], concurrency: int
) -> tuple[list[Answer], float]:
    """Send clips in a given order, `concurrency` at a time.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`; threads share it.
        model: The ensemble that takes an audio file.
        clips: The clips that requests choose from.
        order: Indices into `clips`, one for each request.
        concurrency: Number of clients.

    Returns:
        The answers, and the seconds from the first request to the last answer.

    Raises:
        LoadError: A request failed; no more were sent after it.
    """

    def send(index: int) -> Answer:
        result, latency_s = ask_clip(client, model, clips, index, ANSWERED)
        return Answer.of(index, latency_s, result)

    return send_all(send, order, concurrency)


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
