"""What serving costs: the same clips through the whole ensemble and through its acoustic model alone, in turns.

One clip at a time: the acoustic model in this process, the same through the server, and the ensembles around it. Many
clips: clients that send single clips, whose batches form on the server, beside ready-made batches. All use one server.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from carnelian_serving.backends.onnxruntime.spinning import limit_spinning
from carnelian_serving.backends.threads import count_cores
from carnelian_serving.launcher import Server
from tqdm import tqdm
from tritonclient import grpc

from carnelian_perf.clips import shuffled
from carnelian_perf.cuts import cut_equal
from carnelian_perf.launch import quiet_server
from carnelian_perf.load import Inputs, ask, file_inputs, pcm_inputs, send_all
from carnelian_perf.machine import measure_busy_cores, measure_cpu_s
from carnelian_perf.raw_file import Speech, describe_origin
from carnelian_perf.repository import list_stages, read_config
from carnelian_perf.server.overhead_results import (
    ACOUSTIC,
    FILE,
    FILE_CLIENTS,
    IN_PROCESS,
    PCM,
    PCM_CLIENTS,
    STATIC,
    Measurement,
    Run,
)
from carnelian_perf.stages import settle_statistics

LOGGER = logging.getLogger(__name__)

TRANSCRIPT = ("TRANSCRIPT",)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a measurement of what serving costs."""

    repository: Path
    model: str
    speech: Speech
    """What is cut to the durations; each turn has all clips of a duration, a multiple of `batch`."""
    durations_s: Sequence[float]
    rounds: int
    clients: int
    batch: int


@dataclass(frozen=True)
class Way:
    """One way to process the clips."""

    title: str
    clips_per_request: int
    concurrency: int
    send: Callable[[int], float]
    """Sends the request of this number, and returns the seconds that it took."""


def measure(plan: Plan) -> Iterator[Measurement]:
    """Measure all ways in turns, for each duration and round.

    Yields:
        What was measured so far, after each round, in which every way has had its turn.

    Raises:
        ServerError: The repository could not be served.
        LoadError: A request failed.
    """
    found = Measurement(
        model=plan.model,
        **describe_origin(),
        others_busy_cores=measure_busy_cores(),
        clients=plan.clients,
        batch=plan.batch,
        speech=plan.speech,
        ways={},
        runs=[],
    )
    runs: list[Run] = []
    with (
        quiet_server(plan.repository) as server,
        grpc.InferenceServerClient(server.grpc_url) as client,
        tqdm(total=len(plan.durations_s) * plan.rounds, desc=Measurement.subject, unit="round", disable=None) as bar,
    ):
        session = open_session(plan.repository / f"{plan.model}_acoustic")
        for duration_s in plan.durations_s:
            ways = build_ways(plan, client, session, duration_s)
            for way in ways.values():
                send_all(way.send, range(2 * way.concurrency), way.concurrency)  # warms up
            for round_number in range(1, plan.rounds + 1):
                for name in shuffled(ways, round_number):
                    runs.append(_measure_once(plan, client, server, name, ways[name], duration_s, round_number))
                bar.update()
                yield replace(found, ways={name: way.title for name, way in ways.items()}, runs=list(runs))


def open_session(folder: Path) -> onnxruntime.InferenceSession:
    """Open an acoustic stage's graph in this process, with the options that the server gives it."""
    parameters = {name: value.string_value for name, value in read_config(folder).parameters.items()}
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "true").lower() not in ("0", "false")
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0)) or count_cores()
    limit_spinning(options)
    path = folder / "1" / "model.onnx"
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def build_ways(plan: Plan, client: Any, session: onnxruntime.InferenceSession, duration_s: float) -> dict[str, Way]:
    """Build all ways for clips of one length: name -> way, each after the way that it is compared with."""
    cuts = cut_equal(Path(plan.speech.manifest), duration_s, plan.speech.clips, plan.speech.format)
    signals = np.stack([cut.samples for cut in cuts])
    files = [file_inputs(cut.file) for cut in cuts]
    single = [pcm_inputs(signals[index : index + 1]) for index in range(len(cuts))]
    batches = [pcm_inputs(signals[first : first + plan.batch]) for first in range(0, len(cuts), plan.batch)]
    features = [_make_features(client, plan.model, inputs) for inputs in single]

    def through(model: str, requests: Sequence[Inputs], outputs: Sequence[str] = TRANSCRIPT) -> Callable[[int], float]:
        def send(number: int) -> float:
            return ask(client, model, requests[number % len(requests)], outputs, f"request {number}")[1]

        return send

    def run_here(number: int) -> float:
        row = features[number % len(features)]
        shape = np.array([row["FEATURES"].shape[1:]], np.int32)
        flat = {**row, "FEATURES": row["FEATURES"].reshape(-1), "FEATURES_SHAPE": shape}
        started = time.perf_counter()
        session.run(None, flat)
        return time.perf_counter() - started

    acoustic = through(f"{plan.model}_acoustic", features, ("LOG_PROBS", "LOG_PROB_LENGTH"))
    file_format = plan.speech.format.upper()
    pcm, file = through(f"{plan.model}_pcm", single), through(plan.model, files)
    return {
        IN_PROCESS: Way("the acoustic model alone, in process", 1, 1, run_here),
        ACOUSTIC: Way("the acoustic model alone, through the server", 1, 1, acoustic),
        PCM: Way("the ensemble, of samples", 1, 1, pcm),
        FILE: Way(f"the ensemble, of {file_format} files", 1, 1, file),
        STATIC: Way(f"batches of {plan.batch}, of samples", plan.batch, 1, through(f"{plan.model}_pcm", batches)),
        PCM_CLIENTS: Way(f"{plan.clients} clients, single clips of samples", 1, plan.clients, pcm),
        FILE_CLIENTS: Way(f"{plan.clients} clients, single {file_format} files", 1, plan.clients, file),
    }


def _make_features(client: Any, model: str, inputs: Inputs) -> Inputs:
    names = ("FEATURES", "FEATURE_LENGTH")
    result, _ = ask(client, f"{model}_features", inputs, names, "a clip")
    return {name: result.as_numpy(name) for name in names}


def _measure_once(
    plan: Plan, client: Any, server: Server, name: str, way: Way, duration_s: float, round_number: int
) -> Run:
    order = range(plan.speech.clips // way.clips_per_request)
    is_here = name == IN_PROCESS
    stages = [] if is_here else list_stages(plan.repository, plan.model)
    read_cpu_s: Callable[[], float] = time.process_time if is_here else partial(measure_cpu_s, server.pid)
    before, cpu_s = settle_statistics(client, stages), read_cpu_s()
    latencies_s, wall_s = send_all(way.send, order, way.concurrency)
    cpu_s = read_cpu_s() - cpu_s
    done = {stage: after.since(before[stage]) for stage, after in settle_statistics(client, stages).items()}
    run = Run(
        way=name,
        duration_s=duration_s,
        round=round_number,
        clips=plan.speech.clips,
        wall_s=wall_s,
        latencies_s=[round(latency, 6) for latency in latencies_s],
        cpu_s=round(cpu_s, 4),
        stages={stage: found.mean_request() for stage, found in done.items() if found.requests},
    )
    LOGGER.info(
        "%g s, round %d: %s: %.1f ms, %.1f ms of CPU a clip, %.1f clips/s",
        *(duration_s, round_number, name, run.latency_ms, run.cpu_ms, run.clips_per_s),
    )
    return run
