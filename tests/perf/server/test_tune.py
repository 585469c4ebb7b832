"""The search's arithmetic; and a search of one knob on the real server, small."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from carnelian_export.tuning import read_tuning
from carnelian_perf.cli import main
from carnelian_perf.clips import cut_clips
from carnelian_perf.load import LoadError
from carnelian_perf.raw_file import Traffic
from carnelian_perf.server import tune
from carnelian_perf.server.tune import (
    Knob,
    Plan,
    _Search,
    _Servers,
    list_candidates,
    list_knobs,
    measure,
    read_settings,
)
from carnelian_perf.server.tune_results import (
    CONFIRMATION,
    SHIPPED,
    Measurement,
    Run,
    compare,
    name_settings,
    render_page,
    score,
)

MANIFEST = Path(__file__).parents[3] / "demo/clips/manifest.jsonl"
SETTINGS = {"acoustic": {"instances": 1, "threads": 0}, "ctc": {"instances": 1}}
TWO = {"ctc": {"instances": 2}}


def make_run(
    tuning: str, round_number: int, latency_s: float, step: str = "ctc instances", error: str | None = None
) -> Run:
    return Run(
        step=step,
        tuning=tuning,
        round=round_number,
        others_busy_cores=0.5,
        wall_s=4 * latency_s,
        latencies_s=[] if error else [latency_s] * 4,
        error=error,
        server_cpu_s=0.2,
    )


def make_plan(repository: Path, num_requests: int) -> Plan:
    return Plan(
        repository=repository,
        model="quartznet_demo",
        clips=cut_clips(MANIFEST, 2),
        traffic=Traffic.of("the demo's", [1.0]),
        objective="throughput",
        target_ms=60_000,
        concurrency=2,
        num_requests=num_requests,
        rounds=1,
        knobs=[Knob("ctc instances", "ctc", ({"instances": 1}, {"instances": 2}))],
    )


@pytest.fixture
def measurement(origin) -> Measurement:
    """Two instances are a tenth faster in all rounds, and in the confirmation."""
    name = name_settings(TWO)
    runs = [
        make_run(tuning, number, latency_s, step)
        for step, rounds in (("ctc instances", 3), (CONFIRMATION, 6))
        for number in range(1, rounds + 1)
        for tuning, latency_s in ((SHIPPED, 0.11 * number), (name, 0.1 * number))
    ]
    return Measurement(
        **origin,
        objective="throughput",
        target_ms=5000.0,
        concurrency=4,
        requests=4,
        traffic=Traffic(source="some clips", durations_s=[1.0, 5.0, 12.0]),
        mismatches=[],
        tunings={SHIPPED: {}, name: TWO},
        shipped=SETTINGS,
        kept={"ctc instances": name, CONFIRMATION: name},
        runs=runs,
    )


def test_score_falls_beyond_the_target_and_follows_the_median_latency():
    run = make_run(SHIPPED, 1, 0.5)
    assert score(run, "throughput", 500) == pytest.approx(2.0)
    assert score(run, "throughput", 250) == pytest.approx(1.0)
    assert score(run, "latency", 250) == pytest.approx(2.0)
    assert score(make_run(SHIPPED, 1, 0.5, error="full"), "throughput", 500) == 0


def test_a_change_must_gain_in_most_rounds_not_in_one():
    slow = [make_run(SHIPPED, number, 0.1) for number in (1, 2, 3, 4)]
    steady = [make_run("new", number, latency_s) for number, latency_s in enumerate((0.09, 0.09, 0.09, 0.12), 1)]
    lucky = [make_run("new", number, latency_s) for number, latency_s in enumerate((0.02, 0.09, 0.11, 0.11), 1)]
    little = [make_run("new", number, 0.099) for number in (1, 2, 3, 4)]
    assert compare(steady, slow, "throughput", 500).is_gain
    assert not compare(lucky, slow, "throughput", 500).is_gain
    assert not compare(little, slow, "throughput", 500).is_gain


def test_of_several_gains_the_largest_is_kept_and_without_one_nothing(measurement):
    three = {"ctc": {"instances": 3}}
    measurement.runs.extend(make_run(name_settings(three), number, 0.105 * number) for number in (1, 2, 3))
    plan = make_plan(MANIFEST.parent, num_requests=4)
    with _Servers(plan) as servers:  # none is asked for
        search = _Search(plan, servers, measurement)
        for candidates in ([TWO, three], [three, TWO]):
            assert search.choose("ctc instances", {}, candidates) == TWO
        assert search.choose("ctc instances", TWO, [three]) == TWO
    assert measurement.kept["ctc instances"] == name_settings(TWO)


@pytest.mark.parametrize("dead", [SHIPPED, name_settings(TWO)])
def test_what_others_are_compared_with_must_answer(measurement, monkeypatch, dead):
    """Without its yardstick, a candidate was 48 thousand million times as good."""
    three = {"ctc": {"instances": 3}}

    def measure_once(plan, server, step, settings, round_number):
        name = name_settings(settings)
        return make_run(name, round_number, 0.1, step, "is not healthy" if name in failing else None), []

    monkeypatch.setattr(tune, "_measure_once", measure_once)
    monkeypatch.setattr(_Servers, "find", lambda servers, settings: None)
    with _Servers(make_plan(MANIFEST.parent, num_requests=4)) as servers:
        search = _Search(servers._plan, servers, measurement)
        failing = {name_settings(three)}
        search.take_turns("ctc instances", TWO, [three], 1)
        failing = {dead}
        with pytest.raises(LoadError, match=rf"^{dead}, which others are compared with, must answer, but: is not heal"):
            search.take_turns("ctc instances", TWO, [three], 1)


def test_candidates_are_what_differs_from_the_best_so_far():
    knob = Knob(
        "shares", "acoustic", ({"instances": 1, "threads": 0}, {"instances": 1, "threads": 1}, {"instances": 2})
    )
    assert list_candidates(SETTINGS, {}, knob) == [{"acoustic": {"threads": 1}}, {"acoustic": {"instances": 2}}]
    best = {"acoustic": {"threads": 1}, **TWO}
    assert list_candidates(SETTINGS, best, knob) == [TWO, {"acoustic": {"instances": 2, "threads": 1}, **TWO}]
    assert list_candidates(SETTINGS, {}, Knob("lm", "rescoring", ({"instances": 2},))) == []
    assert list_candidates(SETTINGS, {}, Knob("ctc", "ctc", ({"threads": 2}, {"instances": 2, "threads": 2}))) == [TWO]


def test_every_knob_is_a_setting_of_the_demo_model(repository):
    shipped = read_settings(repository, "quartznet_demo")
    for objective in ("throughput", "latency"):
        for knob in list_knobs(objective, cores=8):
            assert all(set(value) <= set(shipped[knob.stage]) for value in knob.values), knob
            assert list_candidates(shipped, {}, knob), knob


def test_one_request_at_a_time_tries_onnx_runtimes_threads_alone():
    assert [(knob.stage, *knob.values[0]) for knob in list_knobs("latency", cores=8)] == [("acoustic", "threads")]


def test_two_instances_of_features_are_tried_with_what_a_gpus_export_has():
    (knob,) = (knob for knob in list_knobs("throughput", cores=8) if knob.stage == "features")
    shipped = {"features": {"instances": 1, "threads": 8, "preferred_batch": 0, "queue_delay_ms": 0}}
    assert {"features": {"instances": 2}} in list_candidates(shipped, {}, knob)


def test_page_is_made_of_the_raw_file(measurement, tmp_path):
    measurement.write(tmp_path / "raw.json")
    assert Measurement.read(tmp_path / "raw.json") == measurement
    page = render_page(measurement, "raw.json")
    assert "**Result: ctc instances 2.**" in page
    assert "| ctc instances | ctc instances 2 | 5.0 | 200.0 | 200.0 | 50.0 | 1.10 | 1.10 | 1.10 | kept |" in page


@pytest.mark.parametrize(
    ("options", "name"), [((), "raw_tuning.json"), (("--write", "other.json"), "other.json")], ids=["default", "named"]
)
def test_the_result_is_written_for_an_export(measurement, tmp_path, call, monkeypatch, options, name):
    monkeypatch.setattr(tune, "measure", lambda plan: iter([measurement]))
    monkeypatch.chdir(tmp_path)
    repository = MANIFEST.parents[2] / "model_repository"
    status, out, _ = call(
        main, "tune", "--repository", repository, "--manifest", MANIFEST, "--out", "raw.json", *options
    )
    assert status == 0
    assert f"wrote {name}; carnelian-export --tuning {name} exports with it" in out
    assert read_tuning(Path(name))["ctc"].instances == 2
    assert {path.name for path in tmp_path.iterdir()} == {"raw.json", "raw.md", name}


def test_a_page_that_cannot_be_written_costs_no_result(measurement, tmp_path, call, monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda plan: iter([measurement]))
    (tmp_path / "raw.md").mkdir()
    repository = MANIFEST.parents[2] / "model_repository"
    command = ("tune", "--repository", repository, "--manifest", MANIFEST, "--out", tmp_path / "raw.json")
    status, _, err = call(main, *command)
    assert (status, "raw.md" in err) == (1, True), err
    assert read_tuning(tmp_path / "raw_tuning.json")["ctc"].instances == 2


def test_without_its_confirmation_there_is_no_result(measurement, tmp_path, call):
    path = tmp_path / "raw.json"
    first = replace(measurement, kept={"ctc instances": name_settings(TWO)})
    nothing_gained = replace(measurement, kept={"ctc instances": SHIPPED})
    for unconfirmed in (first, replace(nothing_gained, finished=False)):
        unconfirmed.write(path)
        assert call(main, "report", path)[0] == 0
        assert "**Not finished.**" in path.with_suffix(".md").read_text()
    assert "**Result: as shipped.**" in render_page(nothing_gained, "raw.json")


def test_a_model_without_a_knob_is_named_before_anything_is_served(repository):
    plan = replace(make_plan(repository, 20), knobs=[Knob("ctc threads", "ctc", ({"threads": 1},))])
    with pytest.raises(ValueError, match=r"quartznet_demo must have a setting .* have none of ctc threads"):
        list(measure(plan))


def test_a_run_that_fails_has_no_cpu_time(repository, monkeypatch):
    def send_all(send, order, concurrency):
        if len(order) == plan.num_requests:
            raise LoadError("full")
        return [], 1.0

    monkeypatch.setattr(tune, "send_all", send_all)
    monkeypatch.setattr(tune, "measure_cpu_s", lambda pid: 500.0)  # of a server that has run for long
    plan = make_plan(repository, num_requests=20)
    run, heard = tune._measure_once(plan, SimpleNamespace(grpc_url="localhost:9", pid=1), "ctc instances", {}, 1)
    assert (run.error, run.server_cpu_s, heard) == ("full", 0, [])


def test_a_knob_is_turned_on_real_servers(repository):
    # A run takes many of the 10 ms in which the kernel counts CPU time.
    measurement = list(measure(make_plan(repository, num_requests=20)))[-1]
    assert measurement.mismatches == []
    assert measurement.tunings == {SHIPPED: {}, "ctc instances 2": TWO}
    first = [run for run in measurement.runs if run.step == "ctc instances"]
    assert sorted(run.tuning for run in first) == [SHIPPED, "ctc instances 2"]
    assert [run.error for run in first] == [None, None]
    assert [len(run.latencies_s) for run in first] == [20, 20]
    assert all(run.server_cpu_s > 0 for run in first)
    assert measurement.kept["ctc instances"] in measurement.tunings
