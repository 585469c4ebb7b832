"""One step as `carnelian-train fit` takes it, timed."""

import time
from collections.abc import Sequence

import torch
from carnelian_training.config import Config
from carnelian_training.data.loading import Batch
from carnelian_training.data.plan import Item
from carnelian_training.loop.recognition import choose_objective
from carnelian_training.loop.state import State
from carnelian_training.loop.task import Share
from carnelian_training.loop.train import optimise


def timed_step(state: State, items: Sequence[Item], batch: Batch, config: Config) -> tuple[float, float, float]:
    """Take one training step and time it.

    Args:
        state: The training's state, which the step changes.
        items: The clips of all processes.
        batch: The features of this process's clips.
        config: The training's configuration.

    Returns:
        Wall seconds, CPU seconds of this process, and the loss.

    Raises:
        ValueError: No clip of the batch could be read.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    outcome = optimise(state, Share(items, iter([batch]), 1, choose_objective(config, state)), config)
    if state.process.device.type == "cuda":
        torch.cuda.synchronize(state.process.device)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    if outcome is None:
        raise ValueError(
            "a step must have a clip that can be read, but all of its batch were left out, each with a warning that "
            "says why; mend these clips, or name others in `data.train`"
        )
    state.step += 1
    return wall_s, cpu_s, outcome.loss
