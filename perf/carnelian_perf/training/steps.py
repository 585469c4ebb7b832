"""Training throughput in the shape of the published tables: batch sizes, precisions, processes, beside a baseline.

In: a training configuration. Out: one raw file with every step of every cell, and its table with the published rows.
A step is the one that `carnelian-train fit` takes (:func:`carnelian_training.loop.train.optimise`): masks, forward,
loss (CTC, or that of wav2vec 2.0's pre-training), backward, gradient norm, optimiser. Clips have one length, and their
features are ready-made. Ours and the baseline take turns, step by step, so that other load on the machine affects both
alike. CPU seconds, summed over the threads of a process, are kept beside wall seconds: with one thread, they are what a
wall clock would show on an idle machine.
"""

import gc
import itertools
import multiprocessing
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from carnelian_training.config import Config
from carnelian_training.data.loading import Batch
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.distributed import Process, find_device
from carnelian_training.loop.optim import build_optimizer
from carnelian_training.loop.state import State, new_state
from carnelian_training.models.quartznet import QuartzNet
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes
from tqdm import tqdm

from carnelian_perf.machine import measure_busy_cores, name_gpu, torch_threads
from carnelian_perf.options import PRECISIONS
from carnelian_perf.raw_file import describe_origin
from carnelian_perf.training.step import timed_step
from carnelian_perf.training.steps_results import OURS, PLAIN, Cell, Floor, Measurement, Result, Work
from carnelian_perf.yardsticks.floors import count_frames, find_floor, measure_bandwidth, measure_peak
from carnelian_perf.yardsticks.plain import PlainQuartzNet

CHARACTERS_PER_S = 14  # in read English
OUT_OF_MEMORY = "not run: out of memory"
GPU_PRECISIONS = ("tf32", "fp16")
"""Precisions that are measured on a GPU only: a CPU has no TF32, and is slower in float16 than in float32."""


def why_not(cell: Cell) -> str | None:
    """Say why a cell cannot run on this machine; None if it can."""
    has_gpu = torch.cuda.is_available()
    if cell.precision in GPU_PRECISIONS and not has_gpu:
        return "not run: no GPU"
    if has_gpu and cell.processes > torch.cuda.device_count():
        return f"not run: {torch.cuda.device_count()} GPU(s)"
    return None


def grid(batches: list[int], precisions: list[str], processes: list[int], *, has_baseline: bool = True) -> list[Cell]:
    """List the cells of all combinations; after each cell with one process comes the baseline's, if there is one."""
    cells = []
    for precision, batch, count in itertools.product(precisions, batches, processes):
        cells.append(Cell(form=OURS, precision=precision, batch=batch, processes=count))
        if count == 1 and has_baseline:
            cells.append(Cell(form=PLAIN, precision=precision, batch=batch))
    return cells


def time_cells(config: Config, cells: list[Cell], work: Work) -> Iterator[list[Result]]:
    """Time the steps of each cell; cells that differ only in their form take turns, step by step.

    Yields:
        The results so far, in the order of the cells, with those that cannot run, after each group that takes turns.
    """
    results = [Result(cell=cell, not_run=why_not(cell)) for cell in cells]
    runnable = [result for result in results if result.not_run is None]
    if not runnable:
        yield results
    for (_, _, processes), group in itertools.groupby(
        runnable, key=lambda r: (r.cell.precision, r.cell.batch, r.cell.processes)
    ):
        if processes == 1:
            _take_turns(config, list(group), work)
            gc.collect()
            torch.cuda.empty_cache()  # else this process would keep memory that the next cell's processes need
        else:
            for result in group:
                _take_together(config, result, work)
        yield [result for result in results if result.not_run or result.wall_s]


def _take_turns(config: Config, results: list[Result], work: Work) -> None:
    process = Process(find_device())
    forms = [(result, take_steps(config, result.cell, work, process)) for result in results]
    title = f"{results[0].cell.precision}, batches of {results[0].cell.batch}"
    for turn in tqdm(range(work.warm_up + work.steps), desc=title, unit="step", disable=None):
        for result, steps in forms:
            if result.not_run is not None:
                continue
            try:
                wall_s, cpu_s, loss = next(steps)
            except torch.cuda.OutOfMemoryError:  # the other form may need less
                result.not_run = OUT_OF_MEMORY
                result.wall_s, result.cpu_s, result.losses = [], [], []
                continue
            if turn >= work.warm_up:
                result.wall_s.append(wall_s)
                result.cpu_s.append(cpu_s)
                result.losses.append(loss)


def _take_together(config: Config, result: Result, work: Work) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (config, result.cell, work, address, queue)
    processes = start_processes(  # type: ignore[no-untyped-call]
        _run_process, arguments, result.cell.processes, join=False, daemon=True, start_method="spawn"
    )  # daemons end with this process, even at SIGTERM
    try:
        # Read the queue before the processes end: the times of many steps do not fit into its pipe. `join` raises what
        # a process raises.
        while queue.empty() and not processes.join(timeout=0.1):
            pass
        result.wall_s, result.cpu_s, result.losses = queue.get()
        while not processes.join():
            pass
    except ProcessException as error:
        if torch.cuda.OutOfMemoryError.__name__ not in str(error):
            raise RuntimeError(str(error)) from error
        result.not_run = OUT_OF_MEMORY


def _run_process(rank: int, config: Config, cell: Cell, work: Work, address: str, queue: Any) -> None:
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo", init_method=address, rank=rank, world_size=cell.processes
    )
    process = Process(torch.device("cuda", rank) if has_gpu else torch.device("cpu"), rank, cell.processes)
    taken = itertools.islice(take_steps(config, cell, work, process), work.warm_up + work.steps)
    counted = list(taken)[work.warm_up :]
    if process.leads:
        queue.put(tuple(map(list, zip(*counted, strict=True))))
    dist.destroy_process_group()


def take_steps(config: Config, cell: Cell, work: Work, process: Process) -> Iterator[tuple[float, float, float]]:
    """Take a step at each `next`, without end; yield wall seconds, CPU seconds of this process, and the loss."""
    config = replace(config, loop=replace(config.loop, precision=cell.precision))  # type: ignore[arg-type]
    config = replace(config, augment=replace(config.augment, consistency=0.0))  # floors count one view of a clip
    if isinstance(config.model, Wav2Vec2Config):  # all steps do the same work
        config = replace(config, model=replace(config.model, layer_drop=0.0))
    state = build_state(config, cell.form, process)
    clips = draw_clips(config, cell.batch * cell.processes, work.duration_s)
    batch = draw_batch(config, clips[process.rank :: process.size], process.rank)
    while True:
        yield timed_step(state, clips, batch, config)


def build_state(config: Config, form: str, process: Process) -> State:
    """Build the training's state before the first step; both forms have the same weights."""
    state = new_state(config, process)
    if form == OURS:
        return state
    assert isinstance(state.model, QuartzNet)
    plain = PlainQuartzNet.of(state.model).to(process.device)
    return State(plain, build_optimizer(config, plain, process), state.scaler, None, process)


def draw_clips(config: Config, count: int, duration_s: float) -> list[Item]:
    """Draw clips with random texts, the same ones each time."""
    rng = random.Random(1)
    texts = ["".join(rng.choices(config.labels, k=round(duration_s * CHARACTERS_PER_S))) for _ in range(count)]
    return [Item(Clip(Path(f"{i}.wav"), duration_s, text), seed=i) for i, text in enumerate(texts)]


def draw_batch(config: Config, clips: Sequence[Item], seed: int) -> Batch:
    """Make a batch of random features for clips of one length."""
    size, frames = len(clips), count_frames(config, clips[0].clip.duration)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, config.model.feature_channels, frames, generator=generator)
    return Batch(clips, features, torch.full((size,), frames))


def measure(config: Config, cells: list[Cell], work: Work) -> Iterator[Measurement]:
    """Measure this machine's best rates, then the cells.

    Yields:
        What was measured so far, whenever :func:`time_cells` yields.
    """
    origin = describe_origin(name_gpu(find_device().type))
    if torch.cuda.is_available():
        origin["versions"] |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    busy = measure_busy_cores()
    floors = [
        Floor(precision=p, batch=b, **find_floor(config, work.duration_s, b, p))
        for p, b in itertools.product(PRECISIONS, sorted({cell.batch for cell in cells}))
    ]
    with torch_threads(work.threads):
        runnable = sorted({cell.precision for cell in cells if why_not(cell) is None})
        peaks, bandwidth = {precision: measure_peak(precision) for precision in runnable}, measure_bandwidth()
        for results in time_cells(config, cells, work):
            yield Measurement(
                model=config.name,
                **origin,
                objective="transcription" if config.pretraining is None else "pre-training",
                others_busy_cores=busy,
                compiled=config.loop.compile,
                work=work,
                gflop_per_s=peaks,
                gbyte_per_s=bandwidth,
                floors=floors,
                results=results,
            )
