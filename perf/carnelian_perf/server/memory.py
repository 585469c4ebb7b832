"""Memory of a server's processes, at rest and over many requests, and whether it grows.

In: a model repository, served as it is, and clips of mixed length. Out: a raw file with a sample of every process after
every `Plan.every` requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from carnelian_serving.launcher import Server
from carnelian_serving.stubs import find_instance
from tqdm import tqdm
from tritonclient import grpc

from carnelian_perf import raw_file
from carnelian_perf.clips import WavClip, shuffle_order
from carnelian_perf.launch import quiet_server
from carnelian_perf.load import ask_clip, send_all
from carnelian_perf.machine import measure_busy_cores
from carnelian_perf.server.memory_results import SERVER, Measurement, Process, Sample

FILLING = 8
"""How many times all clients send the longest clip at once before the counted requests. A stage keeps a buffer for each
place in a batch, as large as the longest clip that was there; later growth is not needed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of memory."""

    repository: Path
    model: str
    clips: Sequence[WavClip]
    traffic: raw_file.Traffic
    num_requests: int
    every: int
    """Number of requests between two samples."""
    concurrency: int


def measure(plan: Plan) -> Iterator[Measurement]:
    """Serve the repository, send clips, and sample the memory of all processes.

    Yields:
        What was measured so far, after each sample except the one at rest.

    Raises:
        ServerError: The repository could not be served.
        LoadError: A request failed.
    """
    found = Measurement(
        model=plan.model,
        **raw_file.describe_origin(),
        others_busy_cores=measure_busy_cores(),
        concurrency=plan.concurrency,
        traffic=plan.traffic,
        wall_s=0.0,
        samples=[],
    )
    order = shuffle_order(plan.num_requests, len(plan.clips), 0)
    wall_s = 0.0
    with (
        quiet_server(plan.repository) as server,
        grpc.InferenceServerClient(server.grpc_url) as client,
        tqdm(total=len(order), desc=Measurement.subject, unit="request", disable=None) as bar,
    ):
        samples = [take_sample(server, 0)]
        longest = max(range(len(plan.clips)), key=lambda index: plan.clips[index].duration_s)

        def send(index: int) -> None:
            ask_clip(client, plan.model, plan.clips, index, ("TRANSCRIPT", "RESULT"))

        send_all(send, [longest] * FILLING * plan.concurrency, plan.concurrency)
        for start in range(0, len(order), plan.every):
            part = order[start : start + plan.every]
            wall_s += send_all(send, part, plan.concurrency)[1]
            samples.append(take_sample(server, start + len(part)))
            bar.update(len(part))
            yield replace(found, wall_s=round(wall_s, 2), samples=list(samples))


def take_sample(server: Server, requests: int) -> Sample:
    """Read the memory of the server and of all processes that it started, after `requests` answers."""
    main = psutil.Process(server.pid)
    processes = {SERVER: _look(main)}
    for child in main.children(recursive=True):
        processes[find_instance(child.cmdline()) or f"{child.name()} {child.pid}"] = _look(child)
    return Sample(requests=requests, processes=processes, shared_memory_bytes=server.shared_memory_bytes)


def _look(process: psutil.Process) -> Process:
    found = process.memory_full_info()
    return Process(rss=found.rss, pss=found.pss, uss=found.uss)
