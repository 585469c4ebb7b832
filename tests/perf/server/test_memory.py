"""The trend's arithmetic; and a real server looked at, over a few requests."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from carnelian_perf.clips import cut_clips
from carnelian_perf.raw_file import Traffic
from carnelian_perf.server.memory import Plan, measure
from carnelian_perf.server.memory_results import SERVER, Measurement, Process, Sample, find_trend, render_page, trend_of

MANIFEST = Path(__file__).parents[3] / "demo/clips/manifest.jsonl"
RESULTS = MANIFEST.parents[2] / "perf/results"
MIB = 2**20
REQUESTS = [250 * number for number in range(8, 41)]


def noise(index: int) -> int:
    return random.Random(index).randrange(MIB)


def make_measurement(origin: dict[str, Any], samples: list[Sample]) -> Measurement:
    return Measurement(
        **origin,
        others_busy_cores=0.1,
        concurrency=8,
        wall_s=12.0,
        traffic=Traffic(source="some clips", durations_s=[1.0, 5.0, 12.0]),
        samples=samples,
    )


def test_noise_and_a_late_jump_are_flat():
    sizes = [1000 * MIB + noise(index) + (6 * MIB if index > 30 else 0) for index in range(len(REQUESTS))]
    assert find_trend(REQUESTS, sizes).verdict == "flat"


def test_a_leak_of_a_few_kilobytes_a_request_is_seen_and_measured():
    sizes = [1000 * MIB + noise(index) + 4096 * requests for index, requests in enumerate(REQUESTS)]
    trend = find_trend(REQUESTS, sizes)
    assert trend.verdict == "grows"
    assert trend.low < 4096 < trend.high
    assert find_trend(REQUESTS, sizes[::-1]).verdict == "shrinks"


def test_growth_while_memory_settles_is_too_short_to_judge():
    requests = range(60, 301, 60)
    trend = find_trend(requests, [1000 * MIB + 46_324 * number for number in requests])
    assert (trend.verdict, trend.slope) == ("too short", 46_324)


@pytest.mark.parametrize(("num_requests", "verdict"), [(2500, "too short"), (8750, "too short"), (10_000, "grows")])
def test_growth_is_judged_if_all_requests_while_memory_settles_are_left_out(num_requests, verdict):
    """Of a real run without a leak, the first 2,500 requests grow by 5,950 bytes each, all 10,000 by 1,084."""
    found = Measurement.read(RESULTS / "quartznet_demo_memory.json")
    cut = replace(found, samples=[sample for sample in found.samples if sample.requests <= num_requests])
    assert trend_of(cut).verdict == verdict
    note = "- MiB. RSS, PSS, USS: .* Too short: memory grows, but some samples are of the first 2000 requests"
    assert bool(re.search(note, render_page(cut, "raw.json"))) == (verdict == "too short")


def test_a_short_measurement_that_is_flat_says_nothing_of_growth(origin):
    process = Process(rss=9, pss=8, uss=7)
    samples = [Sample(requests=r, processes={SERVER: process}, shared_memory_bytes=0) for r in range(0, 1001, 50)]
    assert "Too short" not in render_page(make_measurement(origin, samples), "raw.json")


def test_too_few_samples_are_unclear():
    assert find_trend([1, 2, 3], [100, 300, 200]).verdict == "unclear"


def test_falling_is_judged_as_rising_is():
    """Sen's interval, of five samples: with a pair that contradicts, neither end is beyond 0."""
    rising = find_trend([10, 20, 30, 40, 50], [500, 499, 510, 520, 530])
    falling = find_trend([10, 20, 30, 40, 50], [500, 501, 490, 480, 470])
    assert rising.verdict == falling.verdict == "unclear"
    assert (rising.low, rising.high) == (-falling.high, -falling.low) == (-0.1, 1.1)


def test_a_measurement_that_ended_at_once_has_no_trend():
    with pytest.raises(ValueError, match="at least two samples after the first 20% of the requests, but there is 1"):
        find_trend([250], [100])


def test_the_trend_is_of_what_comes_after_the_first_fifth(origin):
    process = Process(rss=9, pss=8, uss=7)
    samples = [Sample(requests=r, processes={SERVER: process}, shared_memory_bytes=0) for r in range(0, 1001, 50)]
    settled = make_measurement(origin, samples).settled()
    assert [sample.requests for sample in settled] == list(range(200, 1001, 50))


def test_the_page_has_a_row_for_each_process_and_for_all(origin):
    samples = [
        Sample(
            requests=requests,
            processes={
                SERVER: Process(rss=90 * MIB, pss=80 * MIB, uss=70 * MIB),
                "a_ctc_0": Process(rss=9, pss=8, uss=7),
            },
            shared_memory_bytes=MIB,
        )
        for requests in (0, *REQUESTS)
    ]
    page = render_page(make_measurement(origin, samples), "raw.json")
    assert "| tritonserver | 90.0 | 80.0 | 70.0 | 90.0 | 80.0 | 70.0 | 0 | 0 to 0 | flat |" in page
    assert "| **all** |  | **80.0** |  |  | **80.0** |  | 0 | 0 to 0 | flat |" in page


def test_every_instance_of_a_real_server_is_looked_at(repository):
    plan = Plan(
        repository=repository,
        model="quartznet_demo",
        clips=cut_clips(MANIFEST, 2),
        traffic=Traffic.of("the demo's", [1.0]),
        num_requests=6,
        every=2,
        concurrency=2,
    )
    *earlier, measurement = measure(plan)
    assert [found.samples for found in earlier] == [measurement.samples[:2], measurement.samples[:3]]
    assert [sample.requests for sample in measurement.samples] == [0, 2, 4, 6]
    names = set(measurement.samples[0].processes)
    stages = ("audio_decode", "quartznet_demo_features", "quartznet_demo_acoustic", "quartznet_demo_ctc")
    assert SERVER in names
    assert {stage: sum(name.startswith(stage) for name in names) for stage in stages} == dict(
        zip(stages, (4, 1, 1, 1), strict=True)
    )
    assert len(names) == 8
    last = measurement.samples[-1]
    for process in last.processes.values():
        assert process.rss > MIB  # newer kernels count it for each core, and add up late: it may be below the others
        assert process.pss >= process.uss > MIB
    assert last.shared_memory_bytes > MIB
