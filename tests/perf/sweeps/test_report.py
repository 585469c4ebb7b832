"""The report of a sweep, from result files alone."""

import dataclasses
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from carnelian_perf.cli import main
from carnelian_perf.inference.results import Common, Measurement, Timing
from carnelian_perf.raw_file import Speech, Split
from carnelian_perf.sweeps.grid import Cell, Grid
from carnelian_perf.sweeps.perf_analyzer import WORDS, Report
from carnelian_perf.sweeps.plots import draw_all
from carnelian_perf.sweeps.report import render_html, render_page, render_split, write_report
from carnelian_perf.sweeps.results import RESULT, Result, read_result, read_results, write_grid
from carnelian_perf.sweeps.rows import make_rows
from carnelian_perf.sweeps.unserved import Unserved
from carnelian_perf.yardsticks.published import TRITON_T4, choose

STATIC = Cell(
    model="quartznet_15x5",
    precision="fp32",
    input="pcm",
    protocol="grpc",
    shared_memory="none",
    duration_s=2.0,
    batch=1,
    concurrency=1,
    poisson_share=None,
    round=1,
)
FILES = dataclasses.replace(STATIC, input="file")


def make_result(cell: Cell, avg_ms: float | None = None, reason: str | None = None) -> Result:
    """Stable with a mean latency, failed with a reason, unstable without either."""
    report = None
    if reason is None:
        names = ("features", "acoustic", "ctc")
        report = Report(
            status="stable" if avg_ms else "unstable",
            windows=[(10.0, 90.0), (20.0, 80.0)],
            latency_ms=avg_ms and {"avg": avg_ms, **{f"p{p}": avg_ms + p / 10 for p in (50, 90, 95, 99)}},
            clips_per_s=avg_ms and 900 * cell.batch / avg_ms,  # as perf_analyzer counts
            client_ms=avg_ms and {"send": 0.5, "network": 4.0, "recv": 0.5},  # with the stages' queues, 3 ms
            stages=avg_ms and {f"{cell.model}_{name}": Split(1.0, 1.0, avg_ms / 2 - 3, 1.0) for name in names},
            delayed_percent=0.0,
            requests=avg_ms and 10 * cell.round,
        )
    return Result(
        cell=cell,
        status=report.status if report else "failed",
        reason=reason,
        report=report,
        date="2026-01-01T00:00:00+00:00",
        command="perf_analyzer",
        commit="0123456789ab",
        machine={"cpu": "a CPU", "cores": 2, "accelerator": "none", "system": "Linux"},
        versions={"tritonserver": "2.51.0"},
        backend="onnxruntime",
        accuracy={"wer": 0.125, "cer": 0.05, "utterances": 6, "words": 80},
        speech=Speech(manifest="manifest.jsonl", format="flac", clips=16),
        others_busy_cores=0.1,
        batches={"acoustic": {cell.batch: 10}},
        cpu_ms_per_clip=7.5,
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "small_sweep"
    results = [
        *(
            make_result(dataclasses.replace(STATIC, round=number), ms)
            for number, ms in enumerate((30.0, 20.0, 10.0), 1)
        ),
        make_result(dataclasses.replace(STATIC, batch=8), 40.0),
        make_result(dataclasses.replace(STATIC, batch=16)),
        make_result(dataclasses.replace(STATIC, batch=33), reason="batch-size must be <= 32"),
        make_result(FILES, 25.0),
        make_result(dataclasses.replace(FILES, concurrency=8), 50.0),
        make_result(dataclasses.replace(FILES, concurrency=None, poisson_share=0.5), 30.0),
    ]
    for result in results:
        (folder / result.cell.name).mkdir(parents=True)
        result.write(folder / result.cell.name / RESULT)
    return folder


def read_row(page: str, *starts: str) -> list[str]:
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in page.splitlines()]
    return next(line for line in lines if line[: len(starts)] == list(starts))


def test_tables_have_medians_beside_the_published_row(sweep):
    written = write_report(sweep, choose("quartznet_15x5", "A100", "fp16"))
    page = written[0].read_text()
    assert read_row(page, "2", "1") == [
        *("2", "1", "10 to 30", "25.0", "29.0", "29.5", "29.9", "20.0"),
        *("35.5", "36.4", "55.6", "35.7", "1.79", "50.0", "100", "12.5", "7.5"),
    ]
    assert read_row(page, "2", "16")[2] == "unstable"
    assert "- 2 s, batch 16: unstable, windows of 10.0 to 20.0 clips/s\n" in page
    assert "- 2 s, batch 33: failed: batch-size must be <= 32\n" in page
    assert read_row(page, "2", "batch 8") == [
        *("2", "batch 8", "2.0", *["1.0 + 1.0 + **17.0** + 1.0"] * 3, "40.0", "+100%")
    ]
    assert read_row(page, "2", "8 clients")[8:10] == ["160.0", "320"]
    assert read_row(page, "2", "Poisson, 50% asked for, 19% reached")[8:10] == ["30.0", "60"]  # of 160
    assert "median 0.1) busy just before the runs." in page


@pytest.fixture
def in_process(sweep, origin) -> Measurement:
    """On the sweep's machine, of its model, at batch 8: 20 ms with the engine that is served."""
    timing = Timing(engine="onnx", duration_s=2.0, batch=8, network_ms=[1.0, 15.0, 20.0])
    slower = dataclasses.replace(timing, engine="plain", network_ms=[100.0])
    return Measurement(
        **origin | {"machine": read_results(sweep)[0].machine, "model": "quartznet_15x5"},
        others_busy_cores=0.0,
        gflop_per_s=100.0,
        titles={},
        plan={"precision": "fp32", "threads": "2"},
        timings=[slower, timing],
        common=[Common(duration_s=2.0, batch=8, gflop=1.0, features_ms=[3.0], decoding_ms=[2.0])],
    )


def test_serving_is_compared_with_the_same_work_in_process(sweep, in_process, tmp_path):
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
        ({"plan": in_process.plan | {"precision": "fp16"}}, "precision in the sweep, fp32, but is in fp16: run"),
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


def test_precisions_are_compared_with_the_network_that_they_are_of(sweep, in_process, tmp_path, call, monkeypatch):
    """Each is a model of the sweep, with a name that `infer` does not know."""
    monkeypatch.chdir(tmp_path)
    for model, precision in (("half", "fp16"), ("small", "int8")):
        result = make_result(dataclasses.replace(STATIC, model=model, precision=precision, batch=8), 40.0)
        (sweep / result.cell.name).mkdir()
        result.write(sweep / result.cell.name / RESULT)
    int8 = dataclasses.replace(in_process.timings[1], engine="onnx_int8", network_ms=[5.0])
    in_process = dataclasses.replace(in_process, model="demo", timings=[*in_process.timings, int8])
    in_process.write(tmp_path / "a=b.json")  # a name with a sign of its own
    half = dataclasses.replace(in_process, plan=in_process.plan | {"precision": "fp16"})
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


def test_what_serving_adds_is_a_column_of_the_model_that_was_measured_alone():
    rows = make_rows([make_result(dataclasses.replace(STATIC, model=model), 40.0) for model in ("one", "two")])
    page = render_page(rows, {}, "small", {"two": Unserved("fp32, 1 thread", {(2.0, 1): 20.0})})
    one, two = [line for line in page.splitlines() if line.startswith("| 2 | 1 |")]
    assert "%" not in one
    assert two.endswith("| 20.0 | +125% |")
    assert "by `carnelian-perf infer`, fp32, 1 thread. Serving adds" in page


def test_time_of_client_and_network_that_is_less_than_nothing_is_not_shown():
    result = make_result(STATIC, 40.0)
    (row,) = make_rows([result])
    assert row.client_ms == 2.0
    (row,) = make_rows([dataclasses.replace(result, report=dataclasses.replace(result.report, client_ms={}))])
    assert row.client_ms is None
    assert read_row(render_split([row]), "2", "batch 1")[2] == "-"


def test_all_machines_and_versions_are_named(tmp_path):
    one, two = make_result(STATIC, 40.0), make_result(FILES, 40.0)
    two = dataclasses.replace(two, machine=two.machine | {"cpu": "another"}, versions={"tritonserver": "2.52.0"})
    page = render_page(make_rows([one, two]), {}, "small", {})
    cores = "2 cores, accelerator: none"
    assert f"- Machine: another, {cores}; a CPU, {cores}. Other" in page
    assert "- Versions: tritonserver 2.52.0; tritonserver 2.51.0.\n" in page


def test_rounds_of_two_machines_are_refused():
    one, two = (make_result(dataclasses.replace(STATIC, round=number), 40.0) for number in (1, 2))
    kernel = two.machine | {"system": "a newer kernel"}
    assert len(make_rows([one, dataclasses.replace(two, machine=kernel, versions={"onnx": "1.0"})])) == 1
    for change in ({"machine": two.machine | {"cpu": "another"}}, {"versions": {"tritonserver": "another"}}):
        with pytest.raises(ValueError, match=r"rounds of a cell must be alike in .*_r1 has .* and .*_r2 has another"):
            make_rows([one, dataclasses.replace(two, **change)])


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("report", "latency_ms", "avg"), 0),
        (("report", "latency_ms", "avg"), -3),
        (("report", "latency_ms"), None),
        (("report", "latency_ms"), {"avg": 20.0}),
        (("report", "stages"), {"quartznet_15x5_ctc": {"queue": 1, "input": 0, "infer": 1, "output": 0}}),
        (("report", "stages", "quartznet_15x5_acoustic"), {"queue": 0, "input": 0, "infer": 0, "output": 0}),
        (("report", "clips_per_s"), None),
        (("status",), "unstable"),
        (("accuracy",), {"wer": 0.125}),
        (("machine",), {}),
        (("cell", "batch"), 2),
    ],
)
def test_result_whose_parts_do_not_fit_is_named(sweep, keys, value, call):
    path = sweep / STATIC.name / RESULT
    content = part = json.loads(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(content))
    status, _, err = call(main, "report", sweep, "--published-model", "quartznet_15x5")
    assert status == 1
    assert f"{path} must " in err
    assert list(sweep.parent.iterdir()) == [sweep]


def test_fault_of_a_plot_is_not_of_the_sweep(sweep, monkeypatch):
    monkeypatch.setattr("carnelian_perf.sweeps.report.draw_all", MagicMock(side_effect=TypeError("of drawing")))
    with pytest.raises(TypeError, match="of drawing"):
        write_report(sweep, {})


@pytest.mark.parametrize("name", ["h100.8x", "größe", "my sweep (1)", "."])
def test_any_name_of_the_folder_is_that_of_the_pages(sweep, name, monkeypatch):
    folder = sweep if name == "." else sweep.rename(sweep.with_name(name))
    monkeypatch.chdir(folder if name == "." else folder.parent)
    markdown, *_, html = write_report(Path(name), {})
    assert markdown.resolve() == folder.with_name(f"{folder.name}.md")
    assert markdown.read_text().startswith(f"# {folder.name}: ")
    assert html.read_text().count('src="data:image/png;base64,') == 4


def test_plots_that_a_full_disk_has_no_room_for_stay_as_they_were(sweep, room):
    plot = sweep.with_name("small_sweep_latency.png")
    plot.write_text("old")
    with room(500), pytest.raises(OSError, match="is as it was before"):
        write_report(sweep, {})
    assert plot.read_text() == "old"


def test_requests_and_limits_are_said(sweep):
    folder = sweep / STATIC.name
    result = read_result(folder)
    for cell, requests in ((STATIC, 5), (dataclasses.replace(STATIC, round=2), 2)):
        command = f"perf_analyzer --measurement-request-count {requests} -s 60 -r 8"
        dataclasses.replace(read_result(sweep / cell.name), command=command).write(sweep / cell.name / RESULT)
    limits = "; ".join(f"60 %, each of at least {requests} requests" for requests in (5, 2))
    page = write_report(sweep, {})[0].read_text()
    assert f" Stable: the last three windows agree within {limits}.\n" in page
    older = dataclasses.replace(result, report=dataclasses.replace(result.report, requests=None))
    older.write(folder / RESULT)
    assert read_row(write_report(sweep, {})[0].read_text(), "2", "1")[2] == "-"
    (folder / WORDS).write_text("  Client: \n    Request count: 17\n  Server: \n      Successful request count: 18\n")
    assert read_row(write_report(sweep, {})[0].read_text(), "2", "1")[2] == "17 to 30"


def test_share_of_the_throughput_is_the_one_that_was_reached():
    opened = make_result(dataclasses.replace(FILES, concurrency=None, poisson_share=0.5), 30.0)
    closed = [make_result(dataclasses.replace(FILES, concurrency=number), 50.0) for number in (1, 2)]
    assert make_rows([opened, *closed])[-1].load == "Poisson, 50% asked for, 75% reached"  # 30 of 40
    for others in ([], [make_result(closed[-1].cell)]):
        assert make_rows([opened, *others])[-1].load == "Poisson, 50% asked for"
    failed = dataclasses.replace(opened, status="failed", report=None)
    assert make_rows([failed, *closed])[-1].load == "Poisson, 50% asked for"


def test_plots_of_many_values_can_be_read(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "carnelian_perf.sweeps.plots.write_plot", lambda path, figure: drawn.update({path.stem: figure})
    )
    durations = [float(duration) for duration in range(1, 13)]
    cells = [dataclasses.replace(cell, duration_s=duration) for cell in (STATIC, FILES) for duration in durations]
    cells += [dataclasses.replace(c, **({"batch": 2} if c.input == "pcm" else {"concurrency": 2})) for c in cells]
    draw_all(make_rows([make_result(cell, 40.0) for cell in cells]), {}, tmp_path / "a")
    for name in ("a_latency", "a_throughput"):
        lines = [line for line in drawn[name].axes[0].lines if line.get_linestyle() == "-"]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines) == 12
        assert all(axes.get_xscale() == "log" for axes in drawn[name].axes)
    for name in ("a_stages", "a_batches"):
        (axes,) = drawn[name].axes
        drawn[name].draw_without_rendering()
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert len(boxes) == 24
        assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))


def test_page_is_one_file_with_its_plots(sweep):
    written = write_report(sweep, {})
    assert sorted(path.suffix for path in written) == [".html", ".md", ".png", ".png", ".png", ".png"]
    html = written[-1].read_text()
    assert html.count('src="data:image/png;base64,') == 4
    assert "published" not in html
    assert not {'src="small', 'href="small'} & {html[start : start + 10] for start in range(len(html))}


def test_strings_of_results_are_text(sweep, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    words = "x ![a](secret.png) ![b](https://evil.example/b.png) [c](javascript:1) <script>1</script> | `y"
    for path in sweep.glob(f"*/{RESULT}"):
        result = Result.read(path)
        reason = result.reason and f"{words}\n\n[d]: https://evil.example/d"
        changes = {"commit": words, "backend": words, "machine": result.machine | {"cpu": words}, "reason": reason}
        dataclasses.replace(result, **changes).write(path)
    markdown, *plots, html = write_report(sweep, {})
    page, body = markdown.read_text(), html.read_text()
    assert len(re.findall(r"(?<!\\)\[", page)) == len(plots)
    assert not re.search(r"(?<!\\)<\w|\n\[", page)
    assert len(re.findall("<img", body)) == body.count('src="data:image/png;base64,') == len(plots)
    assert not re.search("<script|<a |href", body)
    assert body.count("x ![a](secret.png) ![b](https://evil.example/b.png) [c](javascript:1) &lt;script&gt;1&lt;") >= 4


def test_only_plots_of_the_report_are_images_of_its_html(tmp_path):
    for name in ("plot.png", "secret.png"):
        (tmp_path / name).write_bytes(b"x")
    page = "# x\n\n![](plot.png) ![](secret.png) ![](https://evil.example/b.png)\n"
    html = render_html(page, [tmp_path / "plot.png"])
    assert re.findall('src="([^"]*)"', html) == ["data:image/png;base64,eA==", "", ""]


def test_loads_and_batches_that_were_not_measured_are_left_out(tmp_path):
    folder = tmp_path / "files_sweep"
    for result in (make_result(FILES, 25.0), make_result(dataclasses.replace(FILES, duration_s=7.0))):
        (folder / result.cell.name).mkdir(parents=True)
        result.write(folder / result.cell.name / RESULT)
    written = write_report(folder, {})
    assert [path.name for path in written[1:-1]] == ["files_sweep_throughput.png", "files_sweep_batches.png"]


def test_what_one_of_several_servers_counts_is_left_out(tmp_path):
    folder = tmp_path / "cluster_sweep"
    for cell in (STATIC, FILES):
        result = make_result(cell, 25.0)
        result = dataclasses.replace(
            result, one_server=False, batches={}, report=dataclasses.replace(result.report, stages=None)
        )
        (folder / cell.name).mkdir(parents=True)
        result.write(folder / cell.name / RESULT)
    page, *plots, _ = write_report(folder, {})
    assert [path.name for path in plots] == ["cluster_sweep_latency.png", "cluster_sweep_throughput.png"]
    text = page.read_text()
    assert "- Several servers answered at one address: " in text
    assert "Where the mean request's milliseconds go" not in text
    assert read_row(text, "2", "1 client")[-3] == "-"


def test_rounds_that_failed_have_words_beside_those_that_did_not():
    again = dataclasses.replace(STATIC, round=2)
    (row,) = make_rows([make_result(STATIC), make_result(again, reason="gone")])
    assert row.troubles == ["round 2 failed: gone", "unstable, windows of 10.0 to 20.0 clips/s"]
    (row,) = rows = make_rows([make_result(STATIC, 40.0), make_result(again, reason="gone")])
    assert row.troubles == ["round 2 failed: gone"]
    page = render_page(rows, {}, "small", {})
    assert "- 2 s, batch 1: round 2 failed: gone\n" in page
    assert "- Runs: 1 stable, 0 unstable, 1 failed.\n" in page
    assert "0 failed. Each checked its transcripts.\n" in render_page(make_rows([row.results[0]]), {}, "a", {})


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


@pytest.mark.parametrize("words", ["report sweep", "infer --render raw.json"])
def test_published_machine_without_a_model_is_refused(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "raw.json").touch()
    for option in ("--published-machine=T4", "--published-precision=tf32"):
        status, _, err = call(main, *words.split(), option)
        assert status == 2
        assert "--published-model" in err


def test_published_tables_have_their_cells():
    a100 = choose("jasper_10x5dr", "a100", "fp16")
    assert len(a100) == 15
    assert (a100[2.0, 1].avg, a100[16.7, 16].avg) == (32.3, 60.92)
    triton = choose("jasper_10x5dr", "triton", "fp16")
    assert triton[16.7, 8].avg == 170.34
    assert triton[16.7, 8].p95 is None
    assert TRITON_T4 in triton[16.7, 8].title


def test_percentiles_that_were_not_published_may_stay_empty(monkeypatch, sweep):
    line = {"model": "m", "hardware": "NVIDIA H100", "precision": "fp16", "batch": "1", "duration_s": "2.0"}
    line |= {"p90": "", "p95": "", "p99": "", "avg": "5.0"}
    tables = {"inference_latency_ms.csv": [line]}
    monkeypatch.setattr("carnelian_perf.yardsticks.published._read_table", lambda name: tables.get(name, []))
    page = write_report(sweep, choose("m", "h100", "fp16"))[0].read_text()
    assert read_row(page, "2", "1")[8:13] == ["-", "-", "-", "5.0", "0.25"]


def test_folder_that_is_no_sweep_is_status_1_or_2(tmp_path, call):
    assert call(main, "report", tmp_path / "nowhere")[0] == 2
    status, _, err = call(main, "report", tmp_path)
    assert status == 1
    assert "as `carnelian-perf sweep` makes it" in err


def test_report_of_an_unfinished_sweep_says_what_is_missing(sweep):
    grid = Grid(name="small", models={"quartznet_15x5": {}}, durations_s=[2], static={"batches": [1, 4]}, rounds=4)
    write_grid(grid, sweep)
    page = write_report(sweep, {})[0].read_text()
    cells = ["2s_b4_c1_r1", "2s_b4_c1_r2", "2s_b4_c1_r3", "2s_b1_c1_r4", "2s_b4_c1_r4"]
    names = ", ".join(f"quartznet_15x5_fp32_pcm_grpc_{cell}" for cell in cells)
    assert f"**Not finished.** Cells without a result: {names}." in page


def test_what_the_grid_has_no_longer_is_left_out_and_counted(sweep):
    write_grid(Grid(name="small", models={"quartznet_15x5": {}}, durations_s=[2], static={"batches": [1, 8]}), sweep)
    page, *plots, html = write_report(sweep, {})
    text = page.read_text()
    assert "**Left out:** results of cells that are no longer in the grid (7).\n" in text
    assert "<strong>Left out:</strong> results of" in html.read_text()
    assert read_row(text, "2", "1")[3] == "35.0"  # of round 1 alone
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| 2 |")][:2] == ["1", "8"]
    assert "## Files" not in text
    assert "- Runs: 2 stable, 0 unstable, 0 failed." in text
    assert [plot.name for plot in plots] == ["small_sweep_latency.png", "small_sweep_stages.png"]
    write_grid(Grid(name="small", models={"another": {}}, static={}), sweep)
    with pytest.raises(ValueError, match=r"must have results of its grid\.json, but its 9 are of other cells"):
        write_report(sweep, {})


def test_cells_of_different_rounds_are_said_to_be():
    rows = make_rows([make_result(STATIC, 40.0), make_result(dataclasses.replace(STATIC, round=2), 40.0)])
    assert "over the stable rounds (of 2). " in render_page(rows, {}, "small", {})
    rows += make_rows([make_result(FILES, 40.0)])
    assert "over the stable rounds (of 1 to 2). " in render_page(rows, {}, "small", {})
