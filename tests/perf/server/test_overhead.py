"""All ways through a real server, small; and the page."""

import shutil
from pathlib import Path

import pytest
from carnelian_perf.raw_file import Speech
from carnelian_perf.repository import read_config, write_config
from carnelian_perf.server.overhead import Plan, measure, open_session
from carnelian_perf.server.overhead_results import FILE, IN_PROCESS, PCM, STATIC, Measurement, Run, render_page

MANIFEST = Path(__file__).parents[3] / "demo/clips/manifest.jsonl"


def test_the_model_in_process_has_the_options_that_its_configuration_gives_the_served_one(repository, tmp_path):
    folder = tmp_path / "acoustic"
    shutil.copytree(repository / "quartznet_demo_acoustic", folder)
    assert not open_session(folder).get_session_options().enable_mem_pattern
    config = read_config(folder)
    config.parameters.clear()
    config.parameters["intra_op_thread_count"].string_value = "1"
    write_config(folder, config)
    options = open_session(folder).get_session_options()
    assert (options.enable_mem_pattern, options.intra_op_num_threads) == (True, 1)


def test_all_ways_take_turns_and_are_compared_round_by_round(repository, tmp_path):
    plan = Plan(
        repository=repository,
        model="quartznet_demo",
        speech=Speech(manifest=str(MANIFEST), format="flac", clips=4),
        durations_s=[0.5],
        rounds=2,
        clients=2,
        batch=2,
    )
    first, measurement = measure(plan)
    assert len(measurement.ways) == 7
    assert first.runs == measurement.runs[:7]
    assert len(measurement.runs) == 2 * len(measurement.ways)
    for run in measurement.runs:
        assert len(run.latencies_s) == (2 if run.way == STATIC else 4), run.way
        assert run.clips == 4
    assert set(measurement.runs_of(FILE, 0.5)[0].stages) == {
        "audio_decode",
        *(f"quartznet_demo_{stage}" for stage in ("features", "acoustic", "ctc")),
    }
    assert "audio_decode" not in measurement.runs_of(PCM, 0.5)[0].stages
    assert measurement.runs_of(IN_PROCESS, 0.5)[0].stages == {}
    middle, low, high = measurement.ratio(FILE, IN_PROCESS, 0.5, lambda run: run.latency_ms)
    assert 0 < low <= middle <= high
    measurement.write(tmp_path / "raw.json")
    assert Measurement.read(tmp_path / "raw.json") == measurement
    page = render_page(measurement, "raw.json")
    assert "| 0.5 | the ensemble, of FLAC files |" in page
    assert "## 2 clients with single clips, compared with batches of 2" in page


def test_ratios_are_of_the_same_round(origin):
    def make(way, number, latency_s):
        return Run(
            way=way,
            duration_s=2,
            round=number,
            clips=1,
            wall_s=latency_s,
            latencies_s=[latency_s],
            cpu_s=0.01,
            stages={},
        )

    runs = [
        make("a", 1, 0.1),
        make("b", 1, 0.2),
        make("b", 2, 6.0),
        make("a", 2, 2.0),
        make("a", 3, 1.0),
        make("b", 3, 4.0),
    ]
    speech = Speech(manifest="manifest.jsonl", format="flac", clips=1)
    measurement = Measurement(
        **origin, others_busy_cores=0.0, clients=16, batch=8, speech=speech, ways={"a": "A", "b": "B"}, runs=runs
    )
    assert measurement.ratio("b", "a", 2, lambda run: run.latency_ms) == pytest.approx((3, 2, 4))
