"""What the stages of a running server have done, by Triton's own statistics."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tritonclient import grpc

from carnelian_perf.load import REQUEST_TIMEOUT_S, LoadError
from carnelian_perf.raw_file import Split

POLL_S = 0.005
"""Seconds between two questions for the statistics, which take time of the server."""
SETTLED_S = 0.05
"""Seconds without a new count after which a stage has counted all its requests: up to 4 ms on two busy cores."""
SETTLING_S = 1.0
"""The longest wait for the counts to stand still, in seconds; on a server that others use, they never do."""
NUM_CONNECTIONS = 16
"""Number of connections to an address that check whether one server answers them all. If two servers share them evenly,
all reach the same one with a probability of 1 in 30,000."""


@dataclass(frozen=True)
class StageStatistics:
    """What a stage has done since the server started, or between two readings."""

    requests: int
    """Number of requests that were answered."""
    spent_ns: Sequence[int]
    """Nanoseconds in queue, input, infer and output, summed over requests; each counts the whole time of its batch."""
    answered_ns: int
    """Nanoseconds from arrival to answer, summed over requests; for an ensemble, with the time between its stages."""
    batches: dict[int, int]
    """Batch size -> number of executions, ascending."""
    computed_ns: int
    """Nanoseconds in infer, summed over executions."""

    def since(self, earlier: "StageStatistics") -> "StageStatistics":
        """Return the statistics of what was done since the `earlier` reading."""
        return StageStatistics(
            self.requests - earlier.requests,
            [now - before for now, before in zip(self.spent_ns, earlier.spent_ns, strict=True)],
            self.answered_ns - earlier.answered_ns,
            dict(Counter(self.batches) - Counter(earlier.batches)),
            self.computed_ns - earlier.computed_ns,
        )

    def mean_request(self) -> Split:
        """Return the mean of one request, rounded to a tenth of a microsecond; there must be one."""
        return Split(*(round(spent_ns / self.requests / 1e6, 4) for spent_ns in self.spent_ns))


def read_statistics(client: Any, model: str) -> StageStatistics:
    """Read Triton's statistics of a stage or an ensemble from the server.

    Raises:
        LoadError: The server does not give them.
    """
    (stage,) = _ask_statistics(client, model).model_stats
    found, batches = stage.inference_stats, sorted(stage.batch_stats, key=lambda batch: batch.batch_size)
    parts = (found.queue, found.compute_input, found.compute_infer, found.compute_output)
    return StageStatistics(
        found.success.count,
        [part.ns for part in parts],
        found.success.ns,
        {batch.batch_size: batch.compute_infer.count for batch in batches},
        sum(batch.compute_infer.ns for batch in batches),
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
        if (now := read_statistics(client, model)).requests >= before.requests + num_requests:
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
        return client.get_inference_statistics(model, client_timeout=REQUEST_TIMEOUT_S)
    except grpc.InferenceServerException as error:
        raise LoadError(f"the server must tell what {model} has done, but says: {error.message()}") from error
