"""What floors are made of."""

import time

import torch
from carnelian_perf.machine import torch_threads
from carnelian_perf.yardsticks.floors import _clock_s


def test_several_threads_are_timed_by_the_wall_for_their_cpu_time_comes_late():
    cpu = torch.device("cpu")
    with torch_threads(2):
        began = _clock_s(cpu)
        time.sleep(0.05)
        assert _clock_s(cpu) - began > 0.04  # no CPU time passes
