"""What floors are made of."""

import time

from carnelian_perf.machine import torch_threads
from carnelian_perf.yardsticks.floors import measure_peak


def test_several_threads_are_timed_by_the_wall_for_their_cpu_time_comes_late(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    with torch_threads(2):
        assert measure_peak("fp32") > 0
