"""What serving costs over the same work in process, in the report of a sweep."""

import dataclasses
import re
import shutil

import pytest
from carnelian_perf.cli import main
from carnelian_perf.inference.results import Common, Measurement, Plan, Timing
from carnelian_perf.sweeps.report import render_page, write_report
from carnelian_perf.sweeps.results import RESULT, read_results
from carnelian_perf.sweeps.rows import make_rows
from carnelian_perf.sweeps.unserved import Unserved


@pytest.fixture
def in_process(sweep, origin) -> Measurement:
    """On the sweep's machine, of its model, at batch 8: 20 ms with the engine that is served."""
    timing = Timing(engine="onnx", duration_s=2.0, batch=8, network_ms=[1.0, 15.0, 20.0])
    slower = dataclasses.replace(timing, engine="plain", network_ms=[100.0])
    plan = Plan(
        source="training/configs/quartznet_15x5.yaml",
        random_weights=True,
        manifest="demo/clips/manifest.jsonl",
        engines=["plain", "onnx"],
        durations_s=[2.0],
        batches=[8],
        steps=3,
        warm_up=0,
        threads=2,
    )
    return Measurement(
        **origin | {"machine": read_results(sweep)[0].machine, "model": "quartznet_15x5"},
        others_busy_cores=0.0,
        gflop_per_s=100.0,
        titles={},
        plan=plan,
        timings=[slower, timing],
        common=[Common(duration_s=2.0, batch=8, gflop=1.0, features_ms=[3.0], decoding_ms=[2.0])],
    )


def test_serving_is_compared_with_the_same_work_in_process(sweep, in_process, tmp_path, read_row):
    raw = tmp_path / "infer.json"
    in_process.write(raw)
    page = write_report(sweep, {}, [(None, raw)])[0].read_text()
    assert read_row(page, "2", "8")[-2:] == ["20.0", "+125%"]  # 45 ms at p50
    assert read_row(page, "2", "1")[-2:] == ["", ""]
    dataclasses.replace(in_process, model="demo").write(raw)
    with pytest.raises(
        ValueError, match=r"of a model of the sweep, quartznet_15x5, but is of demo: .* --infer quartzn"
    ):
        write_report(sweep, {}, [(None, raw)])
    page = write_report(sweep, {}, [("quartznet_15x5", raw)])[0].read_text()
    assert ", of demo, fp32, 2 threads. Serving" in page
    machine = in_process.machine
    for changes, words in (
        ({"machine": machine | {"accelerator": "an H100"}}, "whose accelerator is none, but is of an H100"),
        ({"machine": machine | {"cores": 99}}, "must be of the sweep's machine, whose cores is .*, but is of 99"),
        ({"timings": in_process.timings[:1]}, "run `carnelian-perf infer` with --engines onnx"),
        (
            {"plan": dataclasses.replace(in_process.plan, precision="fp16")},
            "precision in the sweep, fp32, but is in fp16: run",
        ),
    ):
        dataclasses.replace(in_process, **changes).write(raw)
        with pytest.raises(ValueError, match=words) as error:
            write_report(sweep, {}, [(None, raw)])
        assert str(error.value).count(" must ") == 1


def test_a_precision_in_words_says_nothing_of_what_it_is_compared_with(sweep, in_process, tmp_path):
    for result in read_results(sweep):
        shutil.rmtree(sweep / result.cell.name)
        result = dataclasses.replace(result, cell=dataclasses.replace(result.cell, precision="float32"))
        (sweep / result.cell.name).mkdir()
        result.write(sweep / result.cell.name / RESULT)
    in_process.write(raw := tmp_path / "infer.json")
    assert "`carnelian-perf infer`, fp32, 2 threads. Serving" in write_report(sweep, {}, [(None, raw)])[0].read_text()


def test_precisions_are_compared_with_the_network_that_they_are_of(
    sweep, in_process, tmp_path, call, monkeypatch, static_cell, make_result, read_row
):
    """Each is a model of the sweep, with a name that `infer` does not know."""
    monkeypatch.chdir(tmp_path)
    for model, precision in (("half", "fp16"), ("small", "int8")):
        result = make_result(dataclasses.replace(static_cell, model=model, precision=precision, batch=8), 40.0)
        (sweep / result.cell.name).mkdir()
        result.write(sweep / result.cell.name / RESULT)
    int8 = dataclasses.replace(in_process.timings[1], engine="onnx_int8", network_ms=[5.0])
    in_process = dataclasses.replace(in_process, model="demo", timings=[*in_process.timings, int8])
    in_process.write(tmp_path / "a=b.json")  # a name with a sign of its own
    half = dataclasses.replace(in_process, plan=dataclasses.replace(in_process.plan, precision="fp16"))
    dataclasses.replace(half, model="half").write(tmp_path / "half.json")
    status, _, err = call(main, "report", sweep, "--infer", "small=a=b.json", "--infer", "half.json")
    assert status == 0, err
    page = sweep.with_suffix(".md").read_text()
    rows = {part.split(",")[0]: read_row(part, "2", "8")[-2:] for part in page.split("## Batches of samples: ")[1:]}
    assert rows == {"half": ["20.0", "+125%"], "quartznet_15x5": ["12.5", "7.5"], "small": ["10.0", "+350%"]}
    assert "`carnelian-perf infer`, of demo, int8, 2 threads. Serving" in page
    assert "`carnelian-perf infer`, fp16, 2 threads. Serving" in page
    for options, words in (
        (
            ["a=b.json"],
            "of a model of the sweep, half, quartznet_15x5, small, but is of demo: .* --infer half=a=b.json",
        ),
        (["large=a=b.json"], "of a model of the sweep, half, quartznet_15x5, small, but is of large"),
        (["half=a=b.json"], "half's precision in the sweep, fp16, but is in fp32"),
        (["half.json", "half=half.json"], "one file for each model, but half.json is another of half"),
        (["half=nowhere.json"], "--infer must be a file, but nowhere.json is not there"),
    ):
        status, _, err = call(main, "report", sweep, *(word for option in options for word in ("--infer", option)))
        assert status != 0
        assert re.search(words, err)


def test_what_serving_adds_is_a_column_of_the_model_that_was_measured_alone(static_cell, make_result):
    rows = make_rows([make_result(dataclasses.replace(static_cell, model=model), 40.0) for model in ("one", "two")])
    page = render_page(rows, {}, "small", {"two": Unserved("fp32, 1 thread", {(2.0, 1): 20.0})})
    one, two = [line for line in page.splitlines() if line.startswith("| 2 | 1 |")]
    assert "%" not in one
    assert two.endswith("| 20.0 | +125% |")
    assert "by `carnelian-perf infer`, fp32, 1 thread. Serving adds" in page
