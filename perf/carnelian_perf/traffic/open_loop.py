"""Open-loop load on a running server: clips are sent when they are due, whether or not others were answered."""

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient import grpc

from carnelian_perf.clips import WavClip
from carnelian_perf.load import ANSWERED, REQUEST_TIMEOUT_S, Answer, file_inputs, make_tensors


@dataclass(frozen=True)
class Outcome:
    """The answers and errors of a run."""

    answers: list[Answer]
    """Answers; in an open loop, latencies count from when a clip was due, not from when it was sent."""
    errors: list[str]
    wall_s: float
    """Seconds from the first clip that was due to the last answer."""


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
