"""Chooses the number of threads of an instance."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from carnelian_serving import THREADS_VARIABLE
from carnelian_serving.backends.model_config import ModelConfig


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


def read_quotas(own_groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """Return the CPU quotas, in cores, of this process's control groups and of the groups around them.

    Args:
        own_groups: Names the groups, of versions 1 and 2. Inside a container the names may be those outside, which do
            not lie under `mount`: there the container's own group is the outermost.
        mount: The folder of the groups.
    """
    quotas = []
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            group = mount / ("cpu" if controllers else "") / name.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError):
                    quota, period = " ".join((folder / file).read_text() for file in files).split()
                    if quota not in ("max", "-1"):
                        quotas.append(int(quota) / int(period))
    return quotas
