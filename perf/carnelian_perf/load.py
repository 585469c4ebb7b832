"""Closed-loop load on a running server: a number of clients, each of which sends its next clip once it has an answer.

And what the server's stages did meanwhile, by Triton's own statistics.
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
"""Between two looks at what is to come: looking takes time of the server."""
NUM_CONNECTIONS = 16
"""To an address, to see if one server answers all. Of two that share them evenly, one gets all 1 time in 30,000."""
PROCESSED_FRAMES = "PROCESSED_FRAMES"
"""An output of the acoustic graphs of :mod:`carnelian_perf.traffic.graph`, float32 [rows, 1]: the frames that the first
convolution of the batch went over, shared out equally among its rows. Summed over clips it is the work done, padding
included, however the batches were put together."""

T = TypeVar("T")
Inputs: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Of a request, by name."""


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
class Work:
    """Requests, or executions, of a stage together."""

    count: int
    spent_ns: tuple[int, int, int, int]
    """In all: queue, input, infer, output."""

    def since(self, earlier: "Work") -> "Work":
        """What came after `earlier`."""
        spent_ns = tuple(now - before for now, before in zip(self.spent_ns, earlier.spent_ns, strict=True))
        return Work(self.count - earlier.count, spent_ns)  # type: ignore[arg-type]

    def mean(self) -> Split:
        """Of each, to a tenth of a microsecond; there must be one."""
        return Split(*(round(spent_ns / self.count / 1e6, 4) for spent_ns in self.spent_ns))


NOTHING = Work(0, (0, 0, 0, 0))


@dataclass(frozen=True)
class StageStatistics:
    """What a stage has done since the server started, or between two readings."""

    requests: Work
    """Those that were answered; each has the whole time of the batch that it was in."""
    executions: dict[int, Work]
    """By batch size, ascending; a batch does not queue, its requests do."""
    answered_ns: int
    """From arrival to answer, all requests together: of an ensemble its stages and what lies between them."""

    @property
    def batches(self) -> dict[int, int]:
        """Batch size -> executions."""
        return {size: work.count for size, work in self.executions.items()}

    @property
    def compute_s(self) -> float:
        """Of all executions."""
        return sum(work.spent_ns[2] for work in self.executions.values()) / 1e9

    def since(self, earlier: "StageStatistics") -> "StageStatistics":
        """What was done after `earlier`."""
        executions = {size: work.since(earlier.executions.get(size, NOTHING)) for size, work in self.executions.items()}
        done = {size: work for size, work in executions.items() if work.count}
        return StageStatistics(self.requests.since(earlier.requests), done, self.answered_ns - earlier.answered_ns)


def read_statistics(client: Any, model: str) -> StageStatistics:
    """Ask the server what a stage has done.

    Raises:
        LoadError: It does not tell.
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
    """Do new connections to an address all reach the same server? Statistics are of one; an address may have several.

    Args:
        url: host:port of the gRPC endpoint.
        model: One that has answered requests: its count never falls, and stands still only with the time of the last.

    Raises:
        LoadError: It does not tell.
    """
    seen: list[tuple[int, int]] = []
    for _ in range(NUM_CONNECTIONS):
        # Channels to one address would share a connection.
        with grpc.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)]) as client:
            (stage,) = _ask_statistics(client, model).model_stats
        seen.append((stage.inference_stats.success.count, stage.last_inference))
    return all(before[0] < after[0] or before == after for before, after in pairwise(seen))


def await_statistics(client: Any, model: str, before: StageStatistics, num_requests: int = 1) -> StageStatistics:
    """Ask again until a stage has counted so many requests more than `before`: Triton counts one after its answer.

    Raises:
        LoadError: It has not counted them in all the time that a request may take.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    while time.monotonic() < deadline:
        if (now := read_statistics(client, model)).requests.count >= before.requests.count + num_requests:
            return now
        time.sleep(POLL_S)
    raise LoadError(f"{model} must count the requests that it answers, but has not in {REQUEST_TIMEOUT_S:g} s")


def _ask_statistics(client: Any, model: str) -> Any:
    try:
        return client.get_inference_statistics(model)
    except grpc.InferenceServerException as error:
        raise LoadError(f"the server must tell what {model} has done, but says: {error.message()}") from error


def drive(
    client: Any, model: str, clips: Sequence[WavClip], order: Sequence[int], concurrency: int
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
        try:
            workers = [pool.submit(work) for _ in range(concurrency)]
            answers = [answer for worker in workers for answer in worker.result()]
        except BaseException:  # Ctrl-C, for which the pool would send all that is left
            failed.set()
            raise
    return answers, time.perf_counter() - started


def ask(client: Any, model: str, inputs: Inputs, outputs: Sequence[str], of_what: str) -> tuple[Any, float]:
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
    tensors = make_tensors(inputs)
    wanted = [grpc.InferRequestedOutput(name) for name in outputs]
    started = time.perf_counter()
    try:
        result = client.infer(model, tensors, outputs=wanted, client_timeout=REQUEST_TIMEOUT_S)
    except grpc.InferenceServerException as error:
        raise LoadError(f"{model} must answer every clip, but said of {of_what}: {error.message()}") from error
    return result, time.perf_counter() - started


def file_inputs(file: bytes) -> Inputs:
    """What `<model>` takes: one clip as a file."""
    return {"AUDIO": np.frombuffer(file, np.uint8)[np.newaxis]}


def pcm_inputs(signals: npt.NDArray[np.float32]) -> Inputs:
    """What `<model>_pcm` takes: clips of one length, as [rows, samples]."""
    return {"SIGNAL": signals, "SIGNAL_LENGTH": np.full((len(signals), 1), signals.shape[1], np.int32)}


def make_tensors(inputs: Inputs) -> list[Any]:
    """Inputs as the client sends them."""
    tensors = []
    for name, array in inputs.items():
        tensors.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def ask_file(client: Any, model: str, clip: WavClip, outputs: Sequence[str], of_what: str) -> tuple[Any, float]:
    """Send one clip as a file, as :func:`ask` does."""
    return ask(client, model, file_inputs(clip.wav), outputs, of_what)


def _send(client: Any, model: str, clip: WavClip, index: int) -> Answer:
    result, latency_s = ask_file(
        client, model, clip, ("TRANSCRIPT", PROCESSED_FRAMES), f"clip {index} ({clip.duration_s:.1f} s)"
    )
    transcript = result.as_numpy("TRANSCRIPT").item().decode()
    return Answer(index, latency_s, transcript, float(result.as_numpy(PROCESSED_FRAMES).item()))
