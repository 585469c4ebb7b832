import numpy as np
from carnelian_perf.accuracy.pairs import DRAWS, compare


def test_interval_is_that_of_all_draws_at_once():
    rng = np.random.default_rng(1)
    words, before, after = rng.integers(5, 20, 37), rng.integers(0, 5, 37), rng.integers(0, 5, 37)
    drawn = np.random.default_rng(0).integers(0, 37, (DRAWS, 37))
    low, high = np.percentile((after - before)[drawn].sum(1) / words[drawn].sum(1), [2.5, 97.5])
    found = compare(words, before, after)
    assert (found.low, found.high) == (low, high)


def test_clips_of_a_speaker_are_drawn_together():
    words, before, after = [10, 12, 8, 9], [5, 3, 4, 2], [1, 3, 5, 1]
    alone = compare(words, before, after)
    assert compare(2 * words, 2 * before, 2 * after, 2 * [0, 1, 2, 3]) == alone
    assert compare(2 * words, 2 * before, 2 * after).low > alone.low


def test_many_clips_take_little_memory():
    import tracemalloc

    tracemalloc.start()
    try:
        compare(*np.ones((3, 2000), int))
        assert tracemalloc.get_traced_memory()[1] < 20e6  # all draws at once take 160 MB, and as much for each sum
    finally:
        tracemalloc.stop()
