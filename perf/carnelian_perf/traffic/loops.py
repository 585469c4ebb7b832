"""Clips sent to a running server in a closed loop, or in an open one: when they are due, whatever else was answered."""

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient import grpc

from carnelian_perf.clips import WavClip
from carnelian_perf.load import REQUEST_TIMEOUT_S, ask_clip, file_inputs, make_tensors, send_all

PROCESSED_FRAMES = "PROCESSED_FRAMES"
"""An output of the acoustic graphs of :mod:`carnelian_perf.traffic.graph`, float32 [rows, 1]: the frames that the first
convolution processed for the batch, divided equally among its rows. The sum over all clips is the work done, padding
included, whatever batches were formed."""
ANSWERED = ("TRANSCRIPT", PROCESSED_FRAMES)
"""The outputs that an :class:`Answer` is made of."""


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
class Outcome:
    """The answers and errors of a run."""

    answers: list[Answer]
    """Answers; in an open loop, latencies count from when a clip was due, not from when it was sent."""
    errors: list[str]
    wall_s: float
    """Seconds from the first clip that was sent, or due, to the last answer."""


def drive_closed(client: Any, model: str, clips: Sequence[WavClip], order: Sequence[int], concurrency: int) -> Outcome:
    """Send clips in a given order, `concurrency` at a time; without an error, since the first one is raised.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`; threads share it.
        model: The ensemble that takes an audio file.
        clips: The clips that requests choose from.
        order: Indices into `clips`, one for each request.
        concurrency: Number of clients.

    Raises:
        LoadError: A request failed; no more were sent after it.
    """

    def send(index: int) -> Answer:
        result, latency_s = ask_clip(client, model, clips, index, ANSWERED)
        return Answer.of(index, latency_s, result)

    answers, wall_s = send_all(send, order, concurrency)
    return Outcome(answers, [], wall_s)


def draw_arrivals(rate_per_s: float, num_requests: int, seed: int) -> list[float]:
    """Draw the seconds at which clips are due: a given number of Poisson arrivals, the first at 0.

    The gaps, with one after the last arrival, are scaled to take `num_requests / rate_per_s`: otherwise a few hundred
    arrivals would come up to a quarter faster or slower than the given rate.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(num_requests)]
    scale = num_requests / rate_per_s / sum(gaps)
    return [scale * sum_of_gaps for sum_of_gaps in itertools.accumulate(gaps[:-1], initial=0.0)]


def drive_open(
    client: Any, model: str, clips: Sequence[WavClip], order: Sequence[int], due_s: Sequence[float]
) -> Outcome:
    """Send clips when they are due, without waiting for the answers to earlier ones.

    Args:
        client: A `tritonclient.grpc.InferenceServerClient`.
        model: The ensemble that takes an audio file.
        clips: The clips that requests choose from.
        order: Indices into `clips`, one for each request.
        due_s: When each request is sent, in seconds from the start, ascending.
    """
    answers: list[Answer] = []
    errors: list[str] = []
    done = threading.Semaphore(0)
    started = time.perf_counter()

    def receive(index: int, due: float, result: Any, error: Any) -> None:
        latency_s = time.perf_counter() - started - due
        try:
            if error is not None:
                errors.append(f"clip {index}: {error.message()}")
            else:
                answers.append(Answer.of(index, latency_s, result))
        except Exception as failure:  # of a malformed answer: the client's thread would only log it
            errors.append(f"clip {index}: {failure!r}")
        finally:
            done.release()

    outputs = [grpc.InferRequestedOutput(name) for name in ANSWERED]
    for index, due in zip(order, due_s, strict=True):
        tensors = make_tensors(file_inputs(clips[index].wav))
        time.sleep(max(0.0, started + due - time.perf_counter()))
        client.async_infer(
            model,
            tensors,
            callback=lambda result, error, index=index, due=due: receive(index, due, result, error),
            outputs=outputs,
            client_timeout=REQUEST_TIMEOUT_S,
        )
    for _ in order:
        done.acquire()
    return Outcome(answers, errors, time.perf_counter() - started)
