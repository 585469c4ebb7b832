"""A run of a few steps, to be interrupted and resumed."""

import logging

import pytest
import torch
from carnelian_training.distributed import Process
from carnelian_training.loop.run_checkpoints import write_checkpoint
from carnelian_training.loop.state import new_state


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="session")
def config(tiny_config, changed):
    """Dropout, an average, parts of steps, and checkpoints between the evaluations."""
    return changed(
        tiny_config,
        data={"device_batch_s": 5},
        optimizer={"ema": 0.9},
        loop={"steps": 12, "checkpoint_every_steps": 2, "evaluate_every_steps": 12},
    )


@pytest.fixture
def state(config):
    return new_state(config, Process(torch.device("cpu")))


@pytest.fixture
def write_at():
    """Writes checkpoints at the given steps: `write_at(state, config, folder, 1, 2)`."""
    return _write_at


def _write_at(state, config, folder, *steps):
    folder.mkdir(exist_ok=True)
    for state.step in steps:
        write_checkpoint(state, config, folder)
