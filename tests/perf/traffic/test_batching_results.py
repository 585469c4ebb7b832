import dataclasses
from pathlib import Path

import pytest
from carnelian_perf import raw_file
from carnelian_perf.traffic.batching_results import Measurement, choose_best, render_page, render_table, summarise

PERF = Path(__file__).parents[3] / "perf"


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
    assert buckets.batches.percentages == [50, 50]
    assert (buckets.batches.padding_ratio, buckets.acoustic_ms_per_clip, buckets.cpu_ms_per_clip) == (1.5, 50, 100)


def test_summaries_are_in_the_order_of_candidates_and_delays(measurement):
    cells = [(summary.candidate, summary.queue_delay_ms) for summary in summarise(measurement)]
    assert cells == [("buckets", 0), ("ragged", 0), ("ragged", 2)]


def test_best_delay_is_that_of_the_highest_throughput(measurement):
    best = choose_best(summarise(measurement))
    assert {name: summary.queue_delay_ms for name, summary in best.items()} == {"buckets": 0, "ragged": 2}


def test_table_has_a_row_for_each_cell_and_marks_the_best_delay(measurement):
    rows = render_table(measurement).splitlines()[2:]
    assert [row.startswith("| **") for row in rows] == [True, False, True]
    assert "| 2 ms | **4.0** |" in rows[2]


def test_page_says_when_transcripts_differ(measurement):
    different = dataclasses.replace(measurement, mismatches=["clip 3: a / b"])
    assert "equal in every run." in render_page(measurement, "raw.json")
    assert "NOT equal in every run: clip 3: a / b" in render_page(different, "raw.json")


def test_the_docs_show_each_candidate_at_its_best():
    measurement = Measurement.read(PERF / "results/quartznet_demo_batching.json")
    docs, front = ((PERF / page).read_text() for page in ("docs/batching.md", "../README.md"))
    for found in choose_best(summarise(measurement)).values():
        title, (p50, p95, _) = measurement.candidates[found.candidate], found.latency_ms
        batches = f"{found.batches.mean_size:.1f} | {found.batches.padding_ratio:.2f}"
        rest = f"{p95:.0f} | {batches} | {found.cpu_ms_per_clip:.0f}"
        assert f"\n| {title} | {found.queue_delay_ms:g} ms | {found.clips_per_s:.1f} | {rest} |\n" in docs
        assert f"\n| {title} | {found.clips_per_s:.1f} | {p50:.0f} | {p95:.0f} | {batches} |\n" in front
