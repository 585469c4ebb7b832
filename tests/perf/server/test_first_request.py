"""The first requests to a real server, few of them; and the page."""

from pathlib import Path

import pytest
from carnelian_perf.server.first_request import Plan, measure
from carnelian_perf.server.first_request_results import Measurement, Run
from carnelian_perf.server.render_first_request import render

MANIFEST = Path(__file__).parents[3] / "demo/clips/manifest.jsonl"
STAGES = ("audio_decode", *(f"quartznet_demo_{stage}" for stage in ("features", "acoustic", "ctc")))


def make(round_number: int, client_ms: list[float]) -> Run:
    halves = [ms / 2 for ms in client_ms]
    return Run(
        duration_s=2,
        round=round_number,
        others_busy_cores=0.1,
        client_ms=client_ms,
        ensemble_ms=halves,
        stages_ms={"audio_decode": halves, "tiny_ctc": [1.0] * len(client_ms)},
    )


@pytest.fixture
def measurement():
    runs = [make(1, [30, 9, 10, 10]), make(2, [40, 12, 20, 20]), make(3, [5, 7, 10, 10])]
    return Measurement(
        model="tiny",
        date="2026-01-01T00:00:00+00:00",
        command="carnelian-perf first-request",
        commit="0123456789ab",
        machine={"cpu": "a CPU", "cores": 2, "accelerator": "none"},
        versions={"python": "3.11"},
        speech={"manifest": "clips.jsonl", "format": "flac", "clips": 16},
        requests=4,
        runs=runs,
    )


def test_the_first_is_compared_with_the_last_half_of_its_own_round(measurement):
    summary = measurement.summarise(2, lambda run: run.client_ms)
    assert (summary.first_ms, summary.second_ms, summary.settled_ms) == (30, 9, 10)
    assert summary.ratio == (2, 0.5, 3)


def test_the_page_has_a_row_for_the_request_and_each_stage(measurement, tmp_path):
    measurement.write(tmp_path / "raw.json")
    assert Measurement.read(tmp_path / "raw.json") == measurement
    page = render(tmp_path / "raw.json").read_text()
    assert "| 2 | **request** | 30.00 | 9.00 | 10.00 | 2.00 (0.50 to 3.00) |" in page
    assert "| 2 | ensemble | 15.00 | 4.50 | 5.00 | 2.00 (0.50 to 3.00) |" in page
    assert "| 2 | ctc | 1.00 | 1.00 | 1.00 | 1.00 (1.00 to 1.00) |" in page
    assert "Medians of 3 rounds" in page


def test_every_request_to_a_fresh_server_is_timed_by_client_and_stage(repository):
    plan = Plan(
        repository=repository,
        model="quartznet_demo",
        manifest=MANIFEST,
        file_format="flac",
        durations_s=[0.5],
        rounds=1,
        num_requests=4,
    )
    (measurement,) = measure(plan)
    (run,) = measurement.runs
    assert set(run.stages_ms) == set(STAGES)
    for times in (run.client_ms, run.ensemble_ms, *run.stages_ms.values()):
        assert len(times) == 4
        assert min(times) > 0
