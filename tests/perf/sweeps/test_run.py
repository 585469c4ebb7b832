"""A sweep with the real perf_analyzer on the real server, small."""

import dataclasses
import json
import logging
import shlex
from pathlib import Path

import pytest
import yaml
from carnelian_perf.cli import main
from carnelian_perf.cuts import cut_equal, write_files
from carnelian_perf.load import LoadError
from carnelian_perf.machine import describe_machine
from carnelian_perf.sweeps import perf_analyzer
from carnelian_perf.sweeps.grid import CellError, Grid, GridError, list_cells
from carnelian_perf.sweeps.perf_analyzer import PerfAnalyzerError
from carnelian_perf.sweeps.results import RESULT, Result, read_results
from carnelian_perf.sweeps.run import run_grid
from carnelian_perf.sweeps.transcripts import check_answers, transcribe_file
from tritonclient import grpc


@pytest.mark.usefixtures("program")
def test_cells_are_measured_checked_and_kept(make_grid, tmp_path, caplog):
    grid = make_grid(static={"batches": [2]}, files={"concurrency": [2], "poisson": [0.5]})
    results = run_grid(grid, tmp_path)
    assert [result.status for result in results] == ["stable"] * 3, [result.describe() for result in results]
    static, closed, poisson = results
    for result in results:
        latency = result.report.latency_ms
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"]
        # Milliseconds of about the same requests: the server counts those at the ends of a window otherwise.
        assert 0 < result.report.stages["quartznet_demo_acoustic"].total < 10 * latency["avg"]
        assert result.report.requests >= 3 * 3  # of three windows
        assert result.accuracy["utterances"] == 6
        assert result.versions["perf_analyzer"].startswith("2.")
        assert (tmp_path / result.cell.name / perf_analyzer.WORDS).is_file()
    assert set(static.batches["acoustic"]) == {2}
    assert set(static.report.stages) == {f"quartznet_demo_{stage}" for stage in ("features", "acoustic", "ctc")}
    assert set(closed.report.stages) == {*static.report.stages, "audio_decode"}
    words = shlex.split(poisson.command)
    rate = float(words[words.index("--request-rate-range") + 1])
    assert rate == pytest.approx(closed.clips_per_s / 2, rel=1e-3)

    caplog.set_level(logging.INFO, "carnelian_perf")
    assert run_grid(grid, tmp_path) == results  # from their files: nothing is measured again
    assert caplog.messages[-1] == "0 cells measured now, 3 were there"
    assert sorted(read_results(tmp_path), key=Result.describe) == sorted(results, key=Result.describe)

    more = make_grid(static={"batches": [2, 3]})
    for key, others in (
        ("cpu", {"machine": static.machine | {"cpu": "another"}}),
        ("tritonserver", {"versions": static.versions | {"tritonserver": "another"}}),
        ("configuration of quartznet_demo", {"configuration": "another"}),
        ("accuracy of quartznet_demo", {"accuracy": static.accuracy | {"cer": 0.99}}),
    ):
        dataclasses.replace(static, **others).write(tmp_path / static.cell.name / RESULT)
        with pytest.raises(GridError, match=f"{key} must be as it was for the results that are there, .*, but is") as e:
            run_grid(more, tmp_path)
    assert "or another version of carnelian-perf wrote them" in str(e.value)


@pytest.mark.usefixtures("program")
def test_open_loop_is_measured_again_when_its_closed_one_is_another(make_grid, tmp_path, caplog):
    caplog.set_level(logging.INFO, "carnelian_perf")
    run_grid(make_grid(files={"poisson": [0.5]}), tmp_path)
    run_grid(make_grid(files={"concurrency": [1, 2]}), tmp_path)
    grid = make_grid(files={"concurrency": [1, 2], "poisson": [0.5]})
    _, closed, opened = run_grid(grid, tmp_path)
    assert caplog.messages[-1] == "1 cells measured now, 2 were there"
    assert opened.rate_per_s == pytest.approx(closed.clips_per_s / 2, abs=1e-3)
    (tmp_path / closed.cell.name / RESULT).unlink()
    run_grid(grid, tmp_path)
    assert caplog.messages[-1] == "2 cells measured now, 1 were there"


@pytest.mark.usefixtures("program")
def test_open_loop_is_kept_if_its_closed_one_fails_when_measured_again(make_grid, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    grid = make_grid(files={"poisson": [0.5]})
    closed, opened = run_grid(grid, tmp_path)
    unstable = dataclasses.replace(closed.report, status="unstable", latency_ms=None)
    dataclasses.replace(closed, status="unstable", report=unstable).write(tmp_path / closed.cell.name / RESULT)
    monkeypatch.setattr(perf_analyzer, "run", fail)
    caplog.set_level(logging.INFO, "carnelian_perf")
    failed, kept = run_grid(grid, tmp_path, retry=True)
    assert (failed.status, kept) == ("failed", opened)
    assert caplog.messages[-1] == "1 cells measured now, 1 were there"
    assert run_grid(grid, tmp_path) == [failed, opened]


def test_results_are_continued_where_a_native_server_is_installed(manifest, make_result, tmp_path, monkeypatch):
    """It need not be the one that is measured, which tells its version itself."""
    monkeypatch.setattr(perf_analyzer, "find_perf_analyzer", lambda: Path("perf_analyzer"))
    monkeypatch.setattr(perf_analyzer, "find_version", lambda _: "2.51.0")
    monkeypatch.setattr("carnelian_perf.sweeps.run.find_versions", lambda: {"tritonserver": "native 2.46.0"})
    grid = Grid(name="small", models={"quartznet_demo": {}}, manifest=manifest, durations_s=[0.5], static={})
    results = [dataclasses.replace(make_result(cell, 30.0), machine=describe_machine()) for cell in list_cells(grid)]
    for result in results:
        (tmp_path / result.cell.name).mkdir()
        result.write(tmp_path / result.cell.name / RESULT)
    assert run_grid(grid, tmp_path) == results


@pytest.mark.usefixtures("program")
def test_results_of_another_file_format_are_not_continued(make_grid, tmp_path):
    run_grid(make_grid(files={}), tmp_path)
    run_grid(make_grid(static={"batches": [1]}), tmp_path)
    with pytest.raises(GridError, match=r"`files.format` of the grid must be .* are there, flac, but is wav"):
        run_grid(make_grid(files={"format": "wav"}), tmp_path)


@pytest.mark.usefixtures("program")
def test_transcripts_are_taken_before_anything_is_measured(make_grid, tmp_path, monkeypatch):
    def change(*_):
        monkeypatch.setattr("carnelian_perf.sweeps.measure.transcribe_file", lambda *_: "of another model")
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    monkeypatch.setattr(perf_analyzer, "run", change)
    results = run_grid(make_grid(static={"batches": [1]}, durations_s=[0.5, 1]), tmp_path)
    assert [result.reason for result in results] == ["perf_analyzer ended with 99"] * 2


@pytest.mark.usefixtures("program")
def test_unstable_and_failed_cells_are_recorded_and_measured_again_on_request(make_grid, tmp_path, call):
    grid = make_grid(static={"batches": [1, 33]}, stability_percent=1e-6)  # 32 is the largest batch
    unstable, failed = run_grid(grid, tmp_path)
    assert unstable.status == "unstable"
    assert len(unstable.report.windows) == 3
    assert unstable.report.latency_ms is None
    assert "windows of" in unstable.describe()
    assert failed.status == "failed"
    assert "batch-size must be <= 32" in failed.reason
    assert failed.batches == {}
    assert json.loads((tmp_path / failed.cell.name / "result.json").read_text())["reason"] == failed.reason

    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid.model_dump(mode="json")))
    status, said, _ = call(main, "sweep", tmp_path / "grid.yaml", "--out", tmp_path)
    assert status == 1
    assert said.endswith(f"results in {tmp_path}; --retry measures unstable and failed cells again\n")

    easier = make_grid(static={"batches": [1]})
    assert run_grid(easier, tmp_path) == [unstable]
    (again,) = run_grid(easier, tmp_path, retry=True)
    assert again.status == "stable"
    with pytest.raises(GridError, match="`clips`"):
        run_grid(make_grid(static={"batches": [1]}, clips=5), tmp_path)


@pytest.mark.usefixtures("program")
def test_cell_whose_stages_do_not_tell_what_they_did_is_recorded(make_grid, tmp_path, monkeypatch):
    def refuse(*_):
        raise LoadError("the server must tell what quartznet_demo_acoustic has done")

    monkeypatch.setattr("carnelian_perf.sweeps.measure.settle_statistics", refuse)
    (result,) = run_grid(make_grid(static={"batches": [1]}), tmp_path)
    assert (result.status, result.batches, result.cpu_ms_per_clip) == ("failed", {}, None)
    assert "must tell what quartznet_demo_acoustic has done" in result.reason


@pytest.mark.usefixtures("program")
def test_random_weights_are_exported_and_served(make_grid, tmp_path, manifest):
    config = manifest.parents[2] / "training/configs/quartznet_demo.yaml"
    models = {"quartznet_demo": {"random_weights": config, "precision": "fp16"}}
    # As many requests as take many of the 10 ms in which the kernel counts CPU time.
    (result,) = run_grid(make_grid(server=None, models=models, static={"batches": [2]}, requests=20), tmp_path)
    assert result.status == "stable", result.reason
    assert (result.accuracy, result.cell.precision) == ({}, "fp16")
    assert result.cpu_ms_per_clip > 0


def test_wrong_transcript_fails_the_cell(program, server, static_cell, tmp_path, manifest):
    cuts = cut_equal(manifest, 1.0, 2, "flac")
    client = grpc.InferenceServerClient(server.grpc_url)
    try:
        right = [transcribe_file(client, "quartznet_demo", cut) for cut in cuts]
        cell = dataclasses.replace(static_cell, model="quartznet_demo", duration_s=1.0, batch=2)
        check_answers(client, cell, cuts, right, 0)
        with pytest.raises(CellError, match="clip 1 must be transcribed as alone, 'nonsense'"):
            check_answers(client, cell, cuts, [right[0], "nonsense"], 0.1)
        rounded = right[1] + "s"
        check_answers(client, cell, cuts, [right[0], rounded], 0.1)
        with pytest.raises(CellError, match="clip 1"):
            check_answers(client, cell, cuts, [right[0], rounded], 0)
    finally:
        client.close()
    write_files(tmp_path / "wrong.json", cuts, ["nonsense", right[1]])
    command = [program, "-m", "quartznet_demo", "-i", "grpc", "-u", server.grpc_url, "--input-data", "wrong.json"]
    with pytest.raises(PerfAnalyzerError, match="doesn't match expected"):
        perf_analyzer.run(list(map(str, command)), tmp_path, timeout_s=60)


@pytest.mark.usefixtures("program")
def test_a_folder_takes_one_sweep_at_a_time(make_grid, tmp_path, monkeypatch):
    refused = []

    def meanwhile(*_):
        with pytest.raises(GridError, match="another one works in it: wait for that, or name another") as error:
            run_grid(grid, tmp_path / "out")
        refused.append(error)
        raise PerfAnalyzerError("perf_analyzer ended with 99")

    monkeypatch.setattr(perf_analyzer, "run", meanwhile)
    grid = make_grid(static={"batches": [1]})
    assert run_grid(grid, tmp_path / "out")[0].status == "failed"
    assert refused


@pytest.mark.usefixtures("program")
def test_file_in_place_of_the_folder_is_named(make_grid, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(GridError, match=r"results must be in a folder, but .*/out is a file"):
        run_grid(make_grid(static={}), tmp_path / "out")


@pytest.mark.usefixtures("program")
def test_missing_model_is_named_with_what_is_there(make_grid, tmp_path):
    with pytest.raises(RuntimeError, match=r"'jasper' is not; the server has .*quartznet_demo"):
        run_grid(make_grid(models={"jasper": {}}, static={}), tmp_path)


@pytest.mark.usefixtures("program")
def test_model_that_is_no_recogniser_is_named(make_grid, tmp_path):
    with pytest.raises(RuntimeError, match="must name recognisers, but 'audio_decode' has no stage"):
        run_grid(make_grid(models={"audio_decode": {}}, files={}), tmp_path)


def test_missing_program_is_answered_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(PerfAnalyzerError, match=r"in a clone of Carnelian, `make perf-analyzer`"):
        perf_analyzer.find_perf_analyzer()
