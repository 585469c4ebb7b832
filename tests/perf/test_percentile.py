import pytest
from carnelian_perf.percentile import find_percentile


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (51, 3), (99, 4), (1, 1)])
def test_percentile_is_a_value_that_was_seen(percent, value):
    assert find_percentile([4, 2, 3, 1], percent) == value
