import numpy as np
from carnelian_perf.inference.engines import _in_parts
from carnelian_serving.backends.onnxruntime.parts import MAX_RUN_ELEMENTS


def test_a_large_batch_runs_in_parts_and_keeps_its_order():
    sizes = []

    def run(features, lengths):
        sizes.append(len(features))
        return np.stack([features[:, 0, 0], lengths], 1)

    frames = MAX_RUN_ELEMENTS // 64 // 3
    features = np.zeros((7, 64, frames), np.float32)
    features[:, 0, 0] = np.arange(7)
    found = _in_parts(run)(features, np.arange(7, dtype=np.int32))
    assert sizes == [3, 3, 1]
    np.testing.assert_array_equal(found, np.stack([np.arange(7)] * 2, 1))
