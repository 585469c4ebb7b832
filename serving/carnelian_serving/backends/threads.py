"""Chooses the number of threads of an instance."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from carnelian_serving import THREADS_VARIABLE
from carnelian_serving.backends.model_config import ModelConfig
from carnelian_serving.cgroups import own_folders


def thread_count(config: ModelConfig, parameter: str) -> int:
    """Return the value of `carnelian-serve --threads`, else of the parameter, else 0 (the library chooses).

    Args:
        config: The model's configuration.
        parameter: The key under which this backend's native twin reads it.

    Raises:
        ConfigError: The parameter is not an integer.
    """
    return int(os.environ.get(THREADS_VARIABLE, 0)) or config.integer(parameter)


def count_cores() -> int:
    """Return the number of cores that this process may use.

    Those that it may run on, whose hardware threads count once, or, where that is less, a control group's quota of CPU
    time, as of a container, rounded up.
    """
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cpus = os.sched_getaffinity(0)
    try:
        cores = len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except OSError:  # not every sandbox shows the file
        cores = len(cpus)
    return min([cores, *map(math.ceil, read_quotas())])


def read_quotas() -> list[float]:
    """Return the CPU quotas, in cores, of this process's control groups and of the groups around them."""
    quotas = []
    for folder in own_folders("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of version 2, and of version 1
            with contextlib.suppress(OSError):
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if quota not in ("max", "-1"):
                    quotas.append(int(quota) / int(period))
    return quotas
