import dataclasses

import pytest
from carnelian_perf import raw_file
from carnelian_perf.traffic.batching_results import Measurement, choose_best, summarise


def test_what_is_wrong_in_a_raw_file_is_named(measurement, tmp_path):
    content = dataclasses.asdict(measurement)
    content["runs"][1]["colour"] = "red"
    raw_file.write(tmp_path / "raw.json", content)
    with pytest.raises(ValueError, match=r"`carnelian-perf batching`, but is not: runs\.1\.colour: "):
        Measurement.read(tmp_path / "raw.json")


def test_summary_takes_medians_of_rounds_and_sums_batches(measurement):
    buckets = summarise(measurement)[0]
    assert (buckets.candidate, buckets.clips_per_s, buckets.audio_s_per_s) == ("buckets", 2.0, 10.0)
    assert buckets.latency_ms == pytest.approx((200, 400, 400))
    assert buckets.batches.sizes == {1: 6, 2: 3}
    assert buckets.batches.mean_size == pytest.approx(12 / 9)
    assert (buckets.batches.padding_ratio, buckets.acoustic_ms_per_clip, buckets.cpu_ms_per_clip) == (1.5, 50, 100)


def test_summaries_are_in_the_order_of_candidates_and_delays(measurement):
    cells = [(summary.candidate, summary.queue_delay_ms) for summary in summarise(measurement)]
    assert cells == [("buckets", 0), ("ragged", 0), ("ragged", 2)]


def test_best_delay_is_that_of_the_highest_throughput(measurement):
    best = choose_best(summarise(measurement))
    assert {name: summary.queue_delay_ms for name, summary in best.items()} == {"buckets": 0, "ragged": 2}
