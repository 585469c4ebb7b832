"""Inference without a server, by batch and duration, as in the published benchmark; serving is compared with it.

In: a checkpoint and speech cut to exact lengths. Out: one raw file with every step. Engines take turns, step by step,
so that other load on the machine affects all alike; CPU seconds of this process are kept beside wall seconds.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from carnelian_export.engine import EngineError
from carnelian_training.config import Config
from carnelian_training.ctc import Decoder, Options
from carnelian_training.evaluation.evaluate import build_decoder
from carnelian_training.front_end import build_extractor
from carnelian_training.models.network import CtcNetwork
from carnelian_training.precision import allow_tf32
from tqdm import tqdm

from carnelian_perf import raw_file
from carnelian_perf.cuts import cut_equal
from carnelian_perf.inference.engines import Engine, build_engine
from carnelian_perf.inference.results import TITLES, Common, Measurement, Plan, Timing
from carnelian_perf.machine import measure_busy_cores, name_gpu, torch_threads
from carnelian_perf.yardsticks.floors import count_operations, measure_onnx_peak, measure_peak


def check_device(plan: Plan) -> None:
    """Refuse, before a network is loaded, what this machine cannot run.

    Raises:
        ValueError: There is no such device, or it has no such precision.
    """
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda must be where PyTorch has a GPU, but it has none here; measure with --device cpu"
        )
    if plan.device == "cpu" and plan.precision == "tf32":
        raise ValueError("--precision tf32 must go with --device cuda: a CPU has none")


def measure(plan: Plan, config: Config, network: CtcNetwork) -> Iterator[Measurement]:
    """Time features, each engine's network and greedy decoding.

    Args:
        plan: What to measure.
        config: Configuration of the network.
        network: The network of `plan.source`, in evaluation mode, on the CPU.

    Yields:
        What was measured so far, after each duration and batch.
    """
    origin = raw_file.describe_origin(name_gpu(plan.device))
    busy = measure_busy_cores()
    timings: list[Timing] = []
    common: list[Common] = []
    cells = list(itertools.product(plan.durations_s, plan.batches))
    allow_tf32(plan.precision)
    with torch_threads(plan.threads):
        engines = {name: _build(plan, name, network) for name in plan.engines}
        peak = measure_onnx_peak(plan.threads) if plan.device == "cpu" else measure_peak(plan.precision)
        found = Measurement(
            model=config.name,
            **origin,
            others_busy_cores=busy,
            gflop_per_s=round(peak, 1),
            titles={name: TITLES[name] for name in plan.engines},
            plan=plan,
            timings=[],
            common=[],
        )
        for duration_s, batch in tqdm(cells, desc=config.name, unit="cell", disable=None):
            of_all, of_each = measure_cell(plan, config, engines, duration_s, batch)
            common.append(of_all)
            timings += of_each
            yield dataclasses.replace(found, timings=list(timings), common=list(common))


def _build(plan: Plan, name: str, network: CtcNetwork) -> Engine | str:
    """Build an engine, or say why it cannot be built."""
    try:
        return build_engine(name, network, plan.device, plan.precision, plan.threads)
    except EngineError as error:
        return f"not run: {error}"


def measure_cell(
    plan: Plan, config: Config, engines: dict[str, Engine | str], duration_s: float, batch: int
) -> tuple[Common, list[Timing]]:
    """Time all engines on one batch; the failure of one is recorded, and the others go on."""
    signals = [cut.samples for cut in cut_equal(Path(plan.manifest), duration_s, batch, "wav")]
    extract, decoder = build_extractor(config.features, batch, plan.threads), build_decoder(config)
    gflop = batch * count_operations(config, duration_s) / 1e9
    of_all = Common(duration_s=duration_s, batch=batch, gflop=gflop)
    timings = {name: Timing(engine=name, duration_s=duration_s, batch=batch) for name in engines}
    texts: dict[str, list[str]] = {}
    decoding_ms: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(plan.warm_up + plan.steps):
        counted = step >= plan.warm_up
        (features, frames), wall_ms, _ = _time(partial(extract, signals))
        lengths = frames.astype(np.int32)
        if counted:
            of_all.features_ms.append(wall_ms)
        for name, engine in engines.items():
            if isinstance(engine, str):
                timings[name].not_run = engine
                continue
            if timings[name].not_run:
                continue
            try:
                log_probs, wall_ms, cpu_ms = _time(partial(engine, features, lengths))
            except Exception as error:  # ONNX Runtime's share no class; only one batch may need too much memory
                timings[name] = Timing(engine=name, duration_s=duration_s, batch=batch, not_run=_say(error))
                texts.pop(name, None)
                continue
            if counted:
                timings[name].network_ms.append(wall_ms)
                timings[name].network_cpu_ms.append(cpu_ms)
            found, wall_ms, _ = _time(
                partial(_decode, decoder, log_probs[:, : config.model.output_frames(int(lengths[0]))])
            )
            texts.setdefault(name, found)
            if counted:
                decoding_ms[name].append(wall_ms)
    if texts:
        first = next(iter(texts))
        of_all.decoding_ms += decoding_ms[first]
        for name, found in texts.items():
            timings[name].same_texts = found == texts[first]
    return of_all, list(timings.values())


def _say(error: Exception) -> str:
    return f"failed: {str(error).strip().partition(chr(10))[0][:200]}"


def _decode(decoder: Decoder, log_probs: npt.NDArray[np.float32]) -> list[str]:
    return [found.text for found in decoder.decode(list(log_probs), [Options()] * len(log_probs))]


def _time(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call `work`; return its result, wall milliseconds, and CPU milliseconds of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
