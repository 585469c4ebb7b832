"""Tables that others published."""

import pytest
from carnelian_perf.yardsticks.published import TRITON_T4, choose


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (("quartznet_15x5", "TPU", "fp16"), "choose 0"),
        (("jasper_10x5dr", "V100", "fp16"), "choose 3"),
        (("quartznet_demo", "A100", "fp16"), "quartznet_15x5, NVIDIA DGX A100"),
    ],
)
def test_no_or_several_published_tables_are_listed(choice, words):
    with pytest.raises(ValueError, match="must choose one published table") as raised:
        choose(*choice)
    assert words in str(raised.value)


def test_published_tables_have_their_cells():
    a100 = choose("jasper_10x5dr", "a100", "fp16")
    assert len(a100) == 15
    assert (a100[2.0, 1].avg, a100[16.7, 16].avg) == (32.3, 60.92)
    triton = choose("jasper_10x5dr", "triton", "fp16")
    assert triton[16.7, 8].avg == 170.34
    assert triton[16.7, 8].p95 is None
    assert TRITON_T4 in triton[16.7, 8].title
