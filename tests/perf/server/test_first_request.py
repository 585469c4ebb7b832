"""The first requests to a real server, few of them; and the page."""

from pathlib import Path

import pytest
from carnelian_perf.ratio import Ratio
from carnelian_perf.raw_file import Speech
from carnelian_perf.server import first_request
from carnelian_perf.server.first_request import Plan, measure
from carnelian_perf.server.first_request_results import Measurement, Run, render_page

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
def measurement(origin):
    runs = [make(1, [30, 9, 10, 10, 20]), make(2, [40, 12, 20, 20, 50]), make(3, [5, 7, 10, 10, 5])]
    return Measurement(
        **origin | {"model": "tiny"},
        speech=Speech(manifest="clips.jsonl", format="flac", clips=16),
        requests=4,
        rest_s=2,
        runs=runs,
    )


def test_the_first_is_compared_with_the_last_half_of_its_own_row_and_with_those_after_a_rest(measurement):
    summary = measurement.summarise([run.client_ms for run in measurement.runs])
    assert (summary.first_ms, summary.second_ms, summary.settled_ms, summary.rested_ms) == (30, 9, 10, 20)
    assert summary.over_settled == Ratio(median=2, least=0.5, greatest=3)
    assert summary.over_rested == Ratio(median=1, least=0.8, greatest=1.5)


def test_the_page_has_a_row_for_the_request_and_each_stage(measurement):
    page = render_page(measurement, "raw.json")
    assert "| 2 | **request** | 30.00 | 9.00 | 10.00 | 20.00 | 2.00 (0.50 to 3.00) | 1.00 (0.80 to 1.50) |" in page
    assert "| 2 | ensemble | 15.00 | 4.50 | 5.00 | 10.00 | 2.00 (0.50 to 3.00) | 1.00 (0.80 to 1.50) |" in page
    assert "| 2 | ctc | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in page
    assert "Medians of 3 rounds" in page
    assert "the median of 1 requests after the row" in page


def test_every_request_to_a_fresh_server_is_timed_by_client_and_stage(repository, monkeypatch):
    monkeypatch.setattr(first_request, "REST_S", 0.01)
    plan = Plan(
        repository=repository,
        model="quartznet_demo",
        speech=Speech(manifest=str(MANIFEST), format="flac", clips=16),
        durations_s=[0.5],
        rounds=1,
        num_requests=4,
    )
    (measurement,) = measure(plan)
    (run,) = measurement.runs
    assert set(run.stages_ms) == set(STAGES)
    for times in (run.client_ms, run.ensemble_ms, *run.stages_ms.values()):
        assert len(times) == 4 + first_request.NUM_RESTED
        assert min(times) > 0
