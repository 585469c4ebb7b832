"""The report of a sweep, from result files alone."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from carnelian_perf.cli import main
from carnelian_perf.raw_file import Split
from carnelian_perf.sweeps.grid import Grid
from carnelian_perf.sweeps.report import render_page, write_report
from carnelian_perf.sweeps.results import RESULT, Result, read_result, write_grid
from carnelian_perf.sweeps.rows import make_rows
from carnelian_perf.yardsticks.published import choose


def test_tables_have_medians_beside_the_published_row(sweep, read_row):
    written = write_report(sweep, choose("quartznet_15x5", "A100", "fp16"))
    page = written[0].read_text()
    assert read_row(page, "2", "1") == [
        *("2", "1", "10 to 30", "25.0", "29.0", "29.5", "29.9", "20.0"),
        *("35.5", "36.4", "55.6", "35.7", "1.79", "50.0", "100", "12.5", "7.5"),
    ]
    assert read_row(page, "2", "16")[2] == "unstable"
    assert "- 2 s, batch 16: unstable: windows of 10.0 to 20.0 clips/s\n" in page
    assert "- 2 s, batch 33: failed: batch-size must be <= 32\n" in page
    assert read_row(page, "2", "batch 8") == [
        *("2", "batch 8", "2.0", *["1.0 + 1.0 + **7.0** + 1.0"] * 3, "40.0", "+300%")
    ]
    assert read_row(page, "2", "8 clients")[8:10] == ["160.0", "320"]
    assert read_row(page, "2", "Poisson, 50% asked for, 19% reached")[8:10] == ["30.0", "60"]  # of 160
    assert "median 0.1) busy just before the runs." in page
    assert "may be another network" not in page
    assert "\n## FLAC files, one per request: quartznet_15x5, fp32, onnxruntime, grpc\n" in page


def test_stages_that_take_longer_than_the_request_are_compared_with_nothing(static_cell, make_result, read_row):
    result = make_result(static_cell, 40.0)
    for infer_ms, over in ((11.0, "+186%"), (12.0, "-")):  # three stages take 42 ms, which may be chance, or 45
        stages = {name: Split(1.0, 1.0, infer_ms, 1.0) for name in result.report.stages}
        client_ms = {"send": 0.5, "network": 1.0, "recv": 0.5}  # with the stages' queues, 3 ms
        report = dataclasses.replace(result.report, client_ms=client_ms, stages=stages)
        page = render_page(make_rows([dataclasses.replace(result, report=report)]), {}, "small", {})
        row = read_row(page, "2", "batch 1")
        assert (row[2], row[-1]) == ("-", over)


def test_published_network_of_another_name_is_said_to_be_one(sweep):
    page = write_report(sweep, choose("jasper_10x5dr", "A100", "fp16"))[0].read_text()
    assert "over ours. **quartznet_15x5 may be another network than jasper_10x5dr.**\n" in page


def test_all_machines_and_versions_are_named(tmp_path, static_cell, file_cell, make_result):
    one, two = make_result(static_cell, 40.0), make_result(file_cell, 40.0)
    two = dataclasses.replace(two, machine=two.machine | {"cpu": "another"}, versions={"tritonserver": "2.52.0"})
    page = render_page(make_rows([one, two]), {}, "small", {})
    cores = "2 cores, accelerator: none"
    assert f"- Machine: another, {cores}; a CPU, {cores}. Other" in page
    assert "- Versions: tritonserver 2.52.0; tritonserver 2.51.0.\n" in page


def test_rounding_is_said_of_the_models_that_it_may_change(static_cell, make_result):
    cells = [dataclasses.replace(static_cell, model=name, precision=name) for name in ("fp16", "fp32")]
    half, full = (dataclasses.replace(make_result(cell, 40.0), accuracy={}) for cell in cells)
    said = "Rounding may change 10% of a transcript's characters"
    assert f"{said} of fp16 (fp16).\n" in render_page(make_rows([half, full]), {}, "small", {})
    assert f"{said}.\n" in render_page(make_rows([half]), {}, "small", {})
    assert "Rounding" not in render_page(make_rows([full]), {}, "small", {})
    on_gpu = dataclasses.replace(
        full,
        cell=dataclasses.replace(full.cell, duration_s=1),
        machine={**full.machine, "accelerator": "H100"},
    )
    # The last result of a model hid the first one's.
    assert f"{said} of fp32 (fp32).\n" in render_page(make_rows([on_gpu, full]), {}, "small", {})


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
        (("cpu_ms_per_clip",), -1.0),
        (("stability_percent",), "15"),
        (("least_requests",), True),
    ],
)
def test_result_whose_parts_do_not_fit_is_named(sweep, keys, value, call, static_cell):
    path = sweep / static_cell.name / RESULT
    content = part = json.loads(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(content))
    status, _, err = call(main, "report", sweep, "--published-model", "quartznet_15x5")
    assert status == 1
    assert f"{path} must " in err
    assert list(sweep.parent.iterdir()) == [sweep]


@pytest.mark.parametrize("name", ["größe (1) h100.8x", "."])
def test_any_name_of_the_folder_is_that_of_the_pages(sweep, name, monkeypatch):
    folder = sweep if name == "." else sweep.rename(sweep.with_name(name))
    monkeypatch.chdir(folder if name == "." else folder.parent)
    markdown, *_, html = write_report(Path(name), {})
    assert markdown.resolve() == folder.with_name(f"{folder.name}.md")
    assert markdown.read_text().startswith(f"# {folder.name}: ")
    assert html.read_text().count('src="data:image/png;base64,') == 4


def test_requests_and_limits_are_said(sweep, static_cell, read_row):
    folder = sweep / static_cell.name
    result = read_result(folder)
    for cell, requests in ((static_cell, 5), (dataclasses.replace(static_cell, round=2), 2)):
        changed = dataclasses.replace(read_result(sweep / cell.name), least_requests=requests)
        changed.write(sweep / cell.name / RESULT)
    limits = "; ".join(f"30 %, each of at least {requests} requests" for requests in (5, 2))
    page = write_report(sweep, {})[0].read_text()
    assert f" Stable: the last three windows agree within {limits}.\n" in page
    for requests, said in ((None, "-"), (17, "17 to 30")):
        dataclasses.replace(result, report=dataclasses.replace(result.report, requests=requests)).write(folder / RESULT)
        assert read_row(write_report(sweep, {})[0].read_text(), "2", "1")[2] == said


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


@pytest.mark.parametrize("words", ["report sweep", "report raw.json", "infer raw.json"])
def test_published_machine_without_a_model_is_refused(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "raw.json").touch()
    for option in ("--published-machine=T4", "--published-precision=tf32"):
        status, _, err = call(main, *words.split(), option)
        assert status == 2
        assert "--published-model" in err


def test_percentiles_that_were_not_published_may_stay_empty(monkeypatch, sweep, read_row):
    line = {"model": "m", "hardware": "NVIDIA H100", "precision": "fp16", "batch": "1", "duration_s": "2.0"}
    line |= {"p90": "", "p95": "", "p99": "", "avg": "5.0"}
    tables = {"inference_latency_ms.csv": [line]}
    monkeypatch.setattr("carnelian_perf.yardsticks.published._read_table", lambda name: tables.get(name, []))
    page = write_report(sweep, choose("m", "h100", "fp16"))[0].read_text()
    assert read_row(page, "2", "1")[8:13] == ["-", "-", "-", "5.0", "0.25"]


def test_folder_that_is_no_sweep_is_status_1_or_2(tmp_path, call):
    status, _, err = call(main, "report", tmp_path / "nowhere")
    assert status == 2
    assert "is not there" in " ".join(err.replace("│", "").split())
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


def test_what_the_grid_has_no_longer_is_left_out_and_counted(sweep, read_row):
    write_grid(Grid(name="small", models={"quartznet_15x5": {}}, durations_s=[2], static={"batches": [1, 8]}), sweep)
    page, *plots, html = write_report(sweep, {})
    text = page.read_text()
    assert "**Left out:** results of cells that are no longer in the grid (7).\n" in text
    assert "<strong>Left out:</strong> results of" in html.read_text()
    assert read_row(text, "2", "1")[3] == "35.0"  # of round 1 alone
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| 2 |")][:2] == ["1", "8"]
    assert "files, one per request" not in text
    assert "- Runs: 2 stable, 0 unstable, 0 failed." in text
    assert [plot.name for plot in plots] == ["small_sweep_latency.png", "small_sweep_stages.png"]
    write_grid(Grid(name="small", models={"another": {}}, static={}), sweep)
    with pytest.raises(ValueError, match=r"must have results of its grid\.json, but its 9 are of other cells"):
        write_report(sweep, {})
