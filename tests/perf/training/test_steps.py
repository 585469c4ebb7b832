import importlib
import json
import shlex
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from carnelian_perf.cli import main
from carnelian_perf.training.steps import grid, take_steps, time_cells
from carnelian_perf.training.steps_results import OURS, PLAIN, Cell, Measurement, Result, Work, ratios, render_page
from carnelian_perf.yardsticks.floors import count_operations, find_floor
from carnelian_perf.yardsticks.plain import PlainQuartzNet
from carnelian_perf.yardsticks.published import read_throughput
from carnelian_training.config import config_from_dict
from carnelian_training.distributed import Process
from carnelian_training.loop.train import optimise

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "perf" / "results"
CONFIG = ROOT / "training" / "configs" / "quartznet_15x5.yaml"
STAGES = [{"filters": 16, "kernel": 5, "stride": 2, "residual": False}, {"filters": 16, "kernel": 5, "repeat": 2}]
TREE = {"name": "quartznet_15x5", "model": {"name": "quartznet", "stages": STAGES}}
WAV2VEC2 = {"name": "wav2vec2", "conv_channels": [8, 8], "conv_kernels": [10, 8], "conv_strides": [8, 8]}
WAV2VEC2 |= {"width": 8, "layers": 3, "heads": 2, "feed_forward": 16, "position_kernel": 8, "position_groups": 2}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TREE))
    return path


def test_a_table_of_what_ran_what_did_not_and_what_others_published(tiny, tmp_path, call):
    raw = tmp_path / "raw.json"
    arguments = ["--batches", "1,2", "--precisions", "fp32,fp16", "--duration", "1", "--steps", "2", "--out", raw]
    assert call(main, "training", tiny, *arguments)[0] == 0
    page = raw.with_suffix(".md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert sum(row.startswith(f"| {OURS} | fp32") for row in rows) == 2
    assert sum(row.startswith(f"| {PLAIN} | fp32") for row in rows) == 2
    assert sum("not run: no GPU" in row for row in rows) == 4
    assert len({row.count("|") for row in rows if row.startswith((f"| {OURS}", f"| {PLAIN}"))}) == 1
    assert "| NVIDIA DGX A100 (8x A100 80GB) | amp | 48 | 1 | 89.69 |" in rows
    assert "Published by others" in page
    assert "times as fast as plain `Conv1d`" in page
    assert call(main, "report", raw)[0] == 0
    assert raw.with_suffix(".md").read_text() == page


def test_cells_that_were_measured_before_a_failure_are_kept(tiny, tmp_path, call, monkeypatch):
    def fail(config, cell, work, process):
        if cell.batch == 2:
            raise KeyboardInterrupt
        return take_steps(config, cell, work, process)

    monkeypatch.setattr("carnelian_perf.training.steps.take_steps", fail)
    raw = tmp_path / "raw.json"
    words = "--batches 1,2 --precisions fp32,fp16 --duration 1 --steps 1"
    assert call(main, "training", tiny, *words.split(), "--out", raw)[0] != 0
    kept = Measurement.read(raw)
    assert [(result.cell.batch, result.not_run is None) for result in kept.results][:2] == [(1, True), (1, True)]
    assert {result.not_run for result in kept.results[2:]} == {"not run: no GPU"}
    page = render_page(kept, raw.name)
    assert "throughput\n\n**Not finished.** " in page


@pytest.mark.parametrize(
    ("objective", "unit", "processes"), [("pre-training", "pretrain", 2), ("transcription", "finetune", 1)]
)
def test_wav2vec2_is_measured_in_seconds_of_audio_without_a_baseline(objective, unit, processes, tmp_path, call):
    tree = {"name": "wav2vec2_base", "model": WAV2VEC2, "augment": {"spans": {"time_probability": 0.5}}}
    tree["optimizer"] = {"name": "adamw", "betas": [0.9, 0.98]}
    if objective == "pre-training":
        tree["pretraining"] = {"codes": 4, "code_width": 4, "width": 4}
    (tmp_path / "tiny.yaml").write_text(json.dumps(tree))
    raw = tmp_path / "raw.json"
    arguments = ["--processes", processes, "--precisions", "bf16,fp16", "--batches", "2", "--duration", "1"]
    assert call(main, "training", tmp_path / "tiny.yaml", *arguments, "--steps", "2", "--out", raw)[0] == 0
    measured = Measurement.read(raw)
    results = measured.results
    assert measured.objective == objective
    cells = [(r.cell.form, r.cell.precision, r.cell.processes) for r in results]
    assert cells == [(OURS, precision, processes) for precision in ("bf16", "fp16")]
    assert len(results[0].wall_s) == 2
    page = raw.with_suffix(".md").read_text()
    assert "audio s/s" in page
    theirs = read_throughput(f"wav2vec2_base_hourglass/{unit}")[0]["throughput"]
    assert f"| 8 | 1 | {theirs} |" in page
    assert "not seconds of audio" in page
    assert "take turns" not in page


def test_two_processes_scale_weakly(tiny, tmp_path, call):
    raw = tmp_path / "raw.json"
    arguments = ["--processes", "1,2", "--precisions", "fp32", "--batches", "2", "--duration", "1", "--steps", "2"]
    assert call(main, "training", tiny, *arguments, "--out", raw)[0] == 0
    together = next(result for result in Measurement.read(raw).results if result.cell.processes == 2)
    assert len(together.wall_s) == len(together.losses) == 2
    rows = raw.with_suffix(".md").read_text().splitlines()
    row = next(line for line in rows if line.startswith(f"| {OURS} | fp32 | 2 | 2"))
    assert row.endswith("%) |")


def test_processes_end_with_the_command(tiny, tmp_path):
    """SIGTERM, as of `timeout` or systemd, left them at work until all steps were taken."""
    words = ["--processes=2", "--precisions=fp32", "--batches=1", "--duration=1", "--steps=100000"]
    program = Path(sys.executable).with_name("carnelian-perf")
    command = [program, "training", tiny, *words, "--out", tmp_path / "raw.json"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as running:
        while len(psutil.Process(running.pid).children()) < 3:  # two, and multiprocessing's tracker
            assert running.poll() is None
            time.sleep(0.1)
        workers = psutil.Process(running.pid).children()
        time.sleep(1)
        running.terminate()
        assert running.wait(timeout=60) == 1
    assert not psutil.wait_procs(workers, timeout=30)[1]


def test_processes_that_run_out_of_memory_cost_their_own_row(tiny, tmp_path, call, monkeypatch):
    (tmp_path / "full.py").write_text(
        "import torch\ndef run(*_):\n    raise torch.cuda.OutOfMemoryError('CUDA out of memory')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("carnelian_perf.training.steps._run_process", importlib.import_module("full").run)
    raw = tmp_path / "raw.json"
    arguments = ["--processes", "2,1", "--precisions", "fp32", "--batches", "2", "--duration", "1", "--steps", "1"]
    assert call(main, "training", tiny, *arguments, "--out", raw)[0] == 0
    results = Measurement.read(raw).results
    assert [r.not_run for r in results if r.cell.processes == 2] == ["not run: out of memory"]
    assert all(r.not_run is None and r.wall_s for r in results if r.cell.processes == 1)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_the_baseline_takes_the_same_steps(precision, tolerance):
    config = config_from_dict(TREE, "test")
    work = Work(duration_s=1.0, steps=3)
    losses = []
    for form in (OURS, PLAIN):
        cell = Cell(form=form, precision=precision, batch=3)
        steps = take_steps(config, cell, work, Process(torch.device("cpu")))
        losses.append([loss for _, _, loss in islice(steps, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert losses[0][2] < losses[0][0]


def test_a_cell_that_does_not_fit_is_not_run(monkeypatch):
    def refuse(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("carnelian_perf.training.step.optimise", refuse)
    (results,) = time_cells(config_from_dict(TREE, "test"), grid([1], ["fp32"], [1]), Work(duration_s=1.0, steps=1))
    assert {result.not_run for result in results} == {"not run: out of memory"}


def test_ours_is_measured_where_the_baseline_does_not_fit(monkeypatch):
    def refuse(state, *rest):
        if isinstance(state.model, PlainQuartzNet) and state.step == 1:
            raise torch.cuda.OutOfMemoryError
        return optimise(state, *rest)

    monkeypatch.setattr("carnelian_perf.training.step.optimise", refuse)
    config, work = config_from_dict(TREE, "test"), Work(duration_s=1.0, steps=2, warm_up=0)
    ((ours, plain),) = time_cells(config, grid([1], ["fp32"], [1]), work)
    assert (ours.not_run, len(ours.wall_s)) == (None, 2)
    assert (plain.not_run, plain.wall_s) == ("not run: out of memory", [])


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("tf32", 4), ("bf16", 2)])
def test_the_floor_counts_operations_and_bytes(precision, width):
    stages = [{"filters": 8, "kernel": 3, "residual": False, "separable": False}]
    config = config_from_dict({"name": "x", "model": {"name": "quartznet", "stages": stages}}, "test")
    frames, batch, labels = 100, 2, len(config.labels) + 1
    multiplications = frames * (64 * 8 * 3 + 8 * labels)  # the convolution and the head
    moved = frames * (64 + 8 + 8 + labels)
    weights = 64 * 8 * 3 + 8 * labels + labels + 2 * 8
    floor = find_floor(config, 1.0, batch, precision)
    assert floor["gflop"] == pytest.approx(3 * batch * 2 * multiplications / 1e9)
    assert count_operations(config, 1.0) == 2 * multiplications
    assert floor["gbyte"] == pytest.approx((3 * batch * moved * width + 8 * weights * 4) / 1e9)


def test_the_floor_of_wav2vec2_counts_attention_and_frozen_weights_once():
    tree = {"name": "x", "model": WAV2VEC2 | {"layers": 1}}
    tree["init"] = {"checkpoint": "some.pt", "freeze": [{"stages": [0]}]}
    tree |= {"labels": ["a"], "features": {"name": "waveform"}}
    config = config_from_dict(tree, "test")
    # A second: 1999 frames after the first convolution, 249 after the second; computed with a window of 66 samples
    # more, which gives 2008 frames, and up to a multiple of 32 of them.
    first = 2016
    frames = (first - 8) // 8 + 1
    extractor = 2 * (first * 8 * 10 + frames * 8 * 8 * 8)
    linear = 2 * 249 * (8 * 8 + 4 * 8 * 8 + 2 * 8 * 16 + 2 * 8) + 2 * 249 * 8 * 4 * 8  # ... and positions
    attention = 4 * 249 * 249 * 8
    floor = find_floor(config, 1.0, 1, "fp32")
    assert floor["gflop"] == pytest.approx((extractor + 3 * (linear + attention)) / 1e9)
    assert count_operations(config, 1.0) == extractor + linear + attention


def test_rates_are_of_all_processes_by_the_median_step():
    result = Result(cell=Cell(form=OURS, precision="fp32", batch=4, processes=2), wall_s=[1.0, 2.0, 9.0])
    assert result.utterances_per_s() == 4.0


def test_the_baseline_runs_where_it_can_be_compared():
    cells = grid([4], ["fp32"], [1, 2])
    assert [(cell.form, cell.processes) for cell in cells] == [(OURS, 1), (PLAIN, 1), (OURS, 2)]
    assert [cell.form for cell in grid([4], ["fp32"], [1, 2], has_baseline=False)] == [OURS, OURS]


@pytest.mark.parametrize("model", ["quartznet_15x5", "jasper_10x5dr"])
def test_published_rows_are_numbers(model):
    rows = read_throughput(model)
    assert rows
    assert all(float(row["throughput"]) > 0 for row in rows)


def gpu_commands() -> list[list[str]]:
    lines = subprocess.run(["make", "-n", "gpu-training"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line)[2:] for line in lines.splitlines() if "carnelian-perf training" in line]


def test_all_networks_are_measured_on_a_gpu_and_two_of_them_compiled_and_one_without_our_kernels():
    settings = {"loop.compile=true", "loop.depthwise=pytorch"}
    found = [(Path(arguments[0]).stem, *settings.intersection(arguments)) for arguments in gpu_commands()]
    assert sorted(found) == [
        ("jasper_10x5dr",),
        ("jasper_10x5dr", "loop.compile=true"),
        ("quartznet_15x5",),
        ("quartznet_15x5", "loop.compile=true"),
        ("quartznet_15x5", "loop.depthwise=pytorch"),
        ("wav2vec2_base",),
        ("wav2vec2_base_960h",),
    ]


@pytest.mark.parametrize("i", range(7))
def test_what_is_measured_on_a_gpu_runs_on_tiny_sizes(i, tmp_path, monkeypatch, call):
    monkeypatch.chdir(ROOT)
    raw = tmp_path / "raw.json"
    small = ["--duration", "0.5", "--steps", "1", "--warm-up", "1", "--batches", "1", "--out", raw]
    stages = json.dumps([{**stage, "separable": False} for stage in STAGES])
    arguments = gpu_commands()[i]
    overrides = [f"model.stages={stages}", "loop.compile=false"]
    if "wav2vec2" in arguments[0]:
        pooled = {"before": 1, "pooled": 1, "after": 1, "factor": 2}
        overrides = [f"model={json.dumps(WAV2VEC2 | {'hourglass': pooled})}"]
    small += [word for override in overrides for word in ("--set", override)]
    assert call(main, "training", *arguments, *small)[0] == 0
    measured = Measurement.read(raw)
    ran = {result.cell.precision for result in measured.results if result.not_run is None}
    assert ran == ({"tf32", "fp16", "bf16"} if torch.cuda.is_available() else {"bf16"})
    assert {result.cell.form for result in measured.results} == (
        {OURS, PLAIN} if "quartznet" in arguments[0] else {OURS}
    )
    assert all(floor.gflop > 0 for floor in measured.floors)


@pytest.mark.parametrize("name", ["quartznet_15x5_training", "quartznet_15x5_batch16_training"])
def test_a_recorded_step_is_at_least_three_times_as_fast_as_plain_conv1d(name):
    measured = Measurement.read(RESULTS / f"{name}.json")
    assert measured.machine["accelerator"] == "none"
    for (precision, batch), (by_cpu, _) in ratios(measured.results).items():
        assert by_cpu >= 3
        ours, plain = (
            next(r.losses[0] for r in measured.results if r.cell == Cell(form=form, precision=precision, batch=batch))
            for form in (OURS, PLAIN)
        )
        assert ours == pytest.approx(plain, rel=1e-3 if precision == "fp32" else 0.02)


def test_on_a_gpu_only_the_wall_counts_and_half_precision_is_set_beside_tf32(tmp_path):
    raw = tmp_path / "raw.json"
    facts = json.loads((RESULTS / "quartznet_15x5_training.json").read_text())
    facts["machine"]["accelerator"] = "a GPU"
    facts["gflop_per_s"] = {"tf32": 1000.0, "bf16": 2000.0}
    facts["results"] = [
        {"cell": {"form": form, "precision": precision, "batch": 4, "processes": 1}, "wall_s": [s], "cpu_s": [9.0]}
        for form, precision, s in ((OURS, "tf32", 1.0), (PLAIN, "tf32", 2.5), (OURS, "bf16", 0.5))
    ]
    raw.write_text(json.dumps(facts))
    page = render_page(Measurement.read(raw), raw.name)
    assert "**tf32, 4 clips: 2.50 times as fast as plain `Conv1d` in PyTorch eager** by the clock." in page
    assert "- bf16 is 2.00 times as fast as TF32: 4 clips, 1 process." in page
    assert "| Carnelian | bf16 | 4 | 1 | 8.00 |" in page
    assert "Published by others" in page
    raw.write_text(json.dumps(facts | {"model": "mine"}))
    assert "Published by others" not in render_page(Measurement.read(raw), raw.name)
