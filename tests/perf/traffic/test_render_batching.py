import dataclasses
from pathlib import Path

from carnelian_perf.traffic.batching_results import Measurement, choose_best, summarise
from carnelian_perf.traffic.render_batching import render_page, render_table

PERF = Path(__file__).parents[3] / "perf"


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
