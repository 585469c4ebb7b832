"""What floors are made of."""

from carnelian_perf.machine import torch_threads
from carnelian_perf.yardsticks.floors import measure_onnx_peak


def test_two_threads_are_not_much_more_than_twice_as_fast_as_one():
    with torch_threads(1):
        alone = max(measure_onnx_peak(1) for _ in range(3))
    with torch_threads(2):
        together = max(measure_onnx_peak(2) for _ in range(10))  # their CPU time came out at half in most runs, not all
    assert together < 2.8 * alone
