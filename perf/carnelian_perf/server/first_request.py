"""Measure whether the first request to a fresh server is as fast as later ones.

In: a model repository and speech, cut to exact lengths. Out: a raw file with every request to servers that have only
just become ready, as the client and as Triton times it. Each duration has a new server in each round.

Any request after a rest is slower than one that directly follows another: meanwhile, other processes have taken the
caches and the cores' clock rates. So the last few requests come after rests, as the first one does.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from tritonclient import grpc

from carnelian_perf.clips import shuffled
from carnelian_perf.cuts import cut_equal
from carnelian_perf.launch import quiet_server
from carnelian_perf.load import ask, file_inputs
from carnelian_perf.machine import measure_busy_cores
from carnelian_perf.raw_file import Speech, describe_origin
from carnelian_perf.repository import list_stages
from carnelian_perf.server.first_request_results import Measurement, Run
from carnelian_perf.stages import await_statistics, read_statistics

LOGGER = logging.getLogger(__name__)

OUTPUTS = ("TRANSCRIPT", "RESULT")
DISTINCT_CLIPS = 16
"""Number of distinct clips of each duration, which requests send in turn."""
NUM_RESTED = 5
"""Number of requests at the end, each of which comes after a rest."""
REST_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of first requests."""

    repository: Path
    model: str
    speech: Speech
    """What is cut to the durations; each round begins with another clip."""
    durations_s: Sequence[float]
    rounds: int
    num_requests: int
    """Number of requests to each server, one directly after another; a rest comes before the first."""


def measure(plan: Plan) -> Iterator[Measurement]:
    """In each round, for each duration, start a server, send its first requests and some after rests, and stop it.

    The order of the durations changes from round to round.

    Yields:
        What was measured so far, after each server.

    Raises:
        ServerError: The repository could not be served.
        LoadError: A request failed.
    """
    origin = describe_origin()
    files = {
        duration_s: [
            cut.file for cut in cut_equal(Path(plan.speech.manifest), duration_s, plan.speech.clips, plan.speech.format)
        ]
        for duration_s in plan.durations_s
    }
    runs: list[Run] = []
    with tqdm(total=plan.rounds * len(files), desc=Measurement.subject, unit="server", disable=None) as bar:
        for round_number in range(1, plan.rounds + 1):
            for duration_s in shuffled(files, round_number):
                runs.append(_measure_once(plan, files[duration_s], duration_s, round_number))
                bar.update()
                yield Measurement(
                    model=plan.model,
                    **origin,
                    speech=plan.speech,
                    requests=plan.num_requests,
                    rest_s=REST_S,
                    runs=list(runs),
                )


def _measure_once(plan: Plan, files: Sequence[bytes], duration_s: float, round_number: int) -> Run:
    client_ms: list[float] = []
    server_ms: dict[str, list[float]] = {name: [] for name in (plan.model, *list_stages(plan.repository, plan.model))}
    busy = measure_busy_cores()
    with (
        quiet_server(plan.repository) as server,
        grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        # Statistics are read over the same connection, so that it is open before the first clip is sent.
        before = {name: read_statistics(client, name) for name in server_ms}
        for number in range(plan.num_requests + NUM_RESTED):
            if number == 0 or number >= plan.num_requests:
                time.sleep(REST_S)
            file = files[(round_number - 1 + number) % len(files)]
            answered_s = ask(client, plan.model, file_inputs(file), OUTPUTS, f"request {number + 1}")[1]
            client_ms.append(round(1e3 * answered_s, 4))
            for name, times in server_ms.items():
                now = await_statistics(client, name, before[name])
                done, before[name] = now.since(before[name]), now
                spent_ms = done.answered_ns / 1e6 if name == plan.model else done.mean_request().total
                times.append(round(spent_ms, 4))
    run = Run(
        duration_s=duration_s,
        round=round_number,
        others_busy_cores=busy,
        client_ms=client_ms,
        ensemble_ms=server_ms.pop(plan.model),
        stages_ms=server_ms,
    )
    last_ms = client_ms[plan.num_requests - 1]
    LOGGER.info(
        "%g s, round %d: first %.1f ms, last in the row %.1f ms", duration_s, round_number, client_ms[0], last_ms
    )
    return run
