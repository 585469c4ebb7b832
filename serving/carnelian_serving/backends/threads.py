"""How many threads an instance gets."""

from __future__ import annotations

import os
from pathlib import Path

from carnelian_serving import THREADS_VARIABLE
from carnelian_serving.backends.model_config import ModelConfig


def thread_count(config: ModelConfig, parameter: str) -> int:
    """Return what `carnelian-serve --threads` says, else the parameter, else 0 (the library chooses).

    Args:
        config: The model's configuration.
        parameter: The key under which this backend's native twin reads it.

    Raises:
        ConfigError: The parameter is not an integer.
    """
    return int(os.environ.get(THREADS_VARIABLE, 0)) or config.integer(parameter, 0)


def count_cores() -> int:
    """Return how many cores this process may run on; the hardware threads of one core count once."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cpus = os.sched_getaffinity(0)
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except OSError:  # not every sandbox shows it
        return len(cpus)
