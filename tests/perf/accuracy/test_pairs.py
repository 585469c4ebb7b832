import numpy as np
from carnelian_perf.accuracy.pairs import DRAWS, compare


def test_interval_is_that_of_all_draws_at_once():
    rng = np.random.default_rng(1)
    words, before, after = rng.integers(5, 20, 37), rng.integers(0, 5, 37), rng.integers(0, 5, 37)
    drawn = np.random.default_rng(0).integers(0, 37, (DRAWS, 37))
    low, high = np.percentile((after - before)[drawn].sum(1) / words[drawn].sum(1), [2.5, 97.5])
    found = compare(words, before, after)
    assert (found.low, found.high) == (low, high)


def test_many_clips_take_little_memory():
    import tracemalloc

    tracemalloc.start()
    try:
        compare(*np.ones((3, 2000), int))
        assert tracemalloc.get_traced_memory()[1] < 20e6  # all draws at once take 160 MB, and as much for each sum
    finally:
        tracemalloc.stop()
