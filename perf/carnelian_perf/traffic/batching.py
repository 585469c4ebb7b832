"""Measure how batches form: each candidate on the real server, in shuffled traffic, in turns."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from carnelian_serving.launcher import Server
from tritonclient import grpc

from carnelian_perf import raw_file
from carnelian_perf.clips import WavClip, shuffle_order, shuffled
from carnelian_perf.launch import quiet_server
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_perf.stages import await_statistics, read_statistics
from carnelian_perf.traffic.batching_results import Measurement, Run
from carnelian_perf.traffic.candidates import TITLES, Candidate, build_variant
from carnelian_perf.traffic.loops import Answer, drive_closed

LOGGER = logging.getLogger(__name__)

QUEUE_DELAYS_MS = (0.0, 2.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of batching."""

    repository: Path
    model: str
    padded: onnx.ModelProto
    """The model's network for padded batches."""
    clips: Sequence[WavClip]
    traffic: raw_file.Traffic
    concurrency: int
    num_requests: int
    """Number of requests in each run."""
    rounds: int
    candidates: Sequence[Candidate] = tuple(TITLES)
    queue_delays_ms: Sequence[float] = QUEUE_DELAYS_MS


def measure(plan: Plan) -> Iterator[Measurement]:
    """Run every candidate with every queue delay, once in each round and in another order in each.

    Yields:
        What was measured so far, after each round.

    Raises:
        ServerError: a variant could not be served.
        LoadError: a request failed.
    """
    cells = [(candidate, delay) for candidate in plan.candidates for delay in plan.queue_delays_ms]
    found = Measurement(
        model=plan.model,
        **raw_file.describe_origin(),
        concurrency=plan.concurrency,
        traffic=plan.traffic,
        candidates={candidate: TITLES[candidate] for candidate in plan.candidates},
        mismatches=[],
        runs=[],
    )
    runs: list[Run] = []
    transcripts: dict[int, set[str]] = {}
    with tempfile.TemporaryDirectory(prefix="carnelian-perf-") as folder, contextlib.ExitStack() as stack:
        # All servers run all the time, so that rounds are short and other load on the machine affects all alike.
        servers = {cell: stack.enter_context(_serve(plan, Path(folder), *cell)) for cell in cells}
        for round_number in range(1, plan.rounds + 1):
            for candidate, delay in shuffled(cells, round_number):
                run, answers = _measure_once(plan, servers[candidate, delay], candidate, delay, round_number)
                runs.append(run)
                for answer in answers:
                    transcripts.setdefault(answer.clip, set()).add(answer.transcript)
                LOGGER.info(
                    "round %d: %s, queue delay %g ms: %.1f clips/s",
                    round_number,
                    candidate,
                    delay,
                    run.clips_per_s,
                )
            mismatches = [
                f"clip {clip}: {' / '.join(sorted(said))}"
                for clip, said in sorted(transcripts.items())
                if len(said) > 1
            ]
            yield replace(found, mismatches=mismatches, runs=list(runs))


def _serve(plan: Plan, folder: Path, candidate: Candidate, queue_delay_ms: float) -> Server:
    repository = folder / f"{candidate}_{queue_delay_ms:g}ms"
    build_variant(plan.repository, repository, plan.model, candidate, queue_delay_ms, plan.padded)
    return quiet_server(repository)


def _measure_once(
    plan: Plan, server: Server, candidate: Candidate, queue_delay_ms: float, round_number: int
) -> tuple[Run, list[Answer]]:
    order = shuffle_order(plan.num_requests, len(plan.clips), round_number)
    stage = f"{plan.model}_acoustic"
    others_busy_cores = measure_busy_cores()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        idle = read_statistics(client, stage)
        warm_up = order[: plan.concurrency]
        drive_closed(client, plan.model, plan.clips, warm_up, plan.concurrency)
        before = await_statistics(client, stage, idle, len(warm_up))
        cpu_s = measure_cpu_s(server.pid)
        outcome = drive_closed(client, plan.model, plan.clips, order, plan.concurrency)
        cpu_s = measure_cpu_s(server.pid) - cpu_s  # its models are processes of the server's group
        acoustic = await_statistics(client, stage, before, len(order)).since(before)
    run = Run(
        candidate=candidate,
        queue_delay_ms=queue_delay_ms,
        round=round_number,
        others_busy_cores=others_busy_cores,
        wall_s=outcome.wall_s,
        audio_s=sum(plan.clips[index].duration_s for index in order),
        latencies_s=[round(answer.latency_s, 5) for answer in outcome.answers],
        acoustic_batches=acoustic.batches,
        acoustic_compute_s=acoustic.computed_ns / 1e9,
        server_cpu_s=round(cpu_s, 2),
        real_frames=sum(plan.clips[index].frames for index in order),
        processed_frames=sum(answer.processed_frames for answer in outcome.answers),
    )
    return run, outcome.answers
