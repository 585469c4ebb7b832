"""Inference without a server: every engine that a CPU has, on the demo model."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from carnelian_export.engine import EngineError
from carnelian_perf.cli import main
from carnelian_perf.inference.engines import build_engine
from carnelian_perf.inference.measure import check_device, measure, measure_cell
from carnelian_perf.inference.results import GPU_ONLY, Measurement, Plan, render_page
from carnelian_perf.networks import load_network
from carnelian_perf.yardsticks.floors import count_operations

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "demo/quartznet_demo.pt"
MANIFEST = ROOT / "demo/clips/manifest.jsonl"
A100 = {"hardware": "A100", "precision": "fp16"}
ENGINES = ["plain", "eager", "onnx_conv1d", "onnx", *GPU_ONLY]


def make_plan(**given) -> Plan:
    """One clip of one second, unless told otherwise."""
    usual = {"source": str(CHECKPOINT), "random_weights": False, "manifest": str(MANIFEST)}
    usual |= {"durations_s": [1.0], "batches": [1], "threads": 1}
    return Plan(**{**usual, **given})


@pytest.fixture(scope="module")
def measurement():
    plan = make_plan(engines=ENGINES, batches=[1, 2], steps=2, warm_up=1)
    return list(measure(plan, *load_network(CHECKPOINT)))[-1]


def test_engines_agree_and_are_timed_step_by_step(measurement):
    assert [(t.engine, t.batch) for t in measurement.timings] == [(name, batch) for batch in (1, 2) for name in ENGINES]
    for timing in measurement.timings:
        if timing.engine in GPU_ONLY:
            assert timing.not_run == "not run: no GPU"
            continue
        assert timing.same_texts
        assert len(timing.network_ms) == len(timing.network_cpu_ms) == 2
        assert min(timing.network_ms) > 0
    assert all(len(row.features_ms) == len(row.decoding_ms) == 2 for row in measurement.common)


def test_raw_file_is_read_as_written_and_rendered(measurement, tmp_path):
    raw = tmp_path / "small_infer.json"
    measurement.write(raw)
    assert Measurement.read(raw) == measurement
    page = render_page(replace(measurement, published=A100 | {"model": "quartznet_15x5"}), raw.name)
    assert page.count("| PyTorch eager, plain Conv1d |") == 2
    assert page.count("not run: no GPU") == len(GPU_ONLY)
    assert "Texts are equal for all engines." in page
    assert "random weights" not in page


def test_floor_is_the_operations_at_the_best_rate(measurement):
    config, network = load_network(CHECKPOINT)
    assert count_operations(config, 2.0) == pytest.approx(2 * count_operations(config, 1.0), rel=0.05)
    dense = 2 * network.head.weight.numel() * 50  # of a second
    one, two = (row.gflop for row in measurement.common)
    assert two == 2 * one > dense / 1e9
    assert measurement.gflop_per_s > 0
    best = replace(measurement, gflop_per_s=1e3 * one)
    assert render_page(best, "raw.json").count("| 1.00 | ") >= len(ENGINES) - len(GPU_ONLY)


def test_ratios_are_to_the_plain_network_and_wrong_texts_are_told(measurement):
    fast = [
        replace(t, network_cpu_ms=[10.0 if t.engine == "plain" else 0.004], same_texts=t.engine != "onnx")
        for t in measurement.timings
    ]
    page = render_page(replace(measurement, timings=fast), "raw.json")
    assert page.count("| 2500.00 |") == 2 * 3  # no time that was measured
    said = "- Texts of ONNX Runtime, as served DIFFER from those of PyTorch eager, plain Conv1d in 2 rows."
    assert f"{said}\n" in page
    without = [replace(t, not_run="no memory") if (t.engine, t.batch) == ("plain", 2) else t for t in fast]
    page = render_page(replace(measurement, timings=without), "raw.json")
    for first in ("PyTorch eager, plain Conv1d", "PyTorch eager"):
        assert f" Texts of ONNX Runtime, as served DIFFER from those of {first} in 1 row." in page
    note = " With random weights, rounding in fp16 decides which label is best; it does not change the speed."
    for precision, because in (("fp32", ""), ("fp16", note)):
        of_yaml = {"source": "training/configs/quartznet_15x5.yaml", "random_weights": True}
        plan = replace(measurement.plan, **of_yaml, precision=precision)
        page = render_page(replace(measurement, timings=fast, plan=plan), "raw.json")
        assert f"{said}{because}\n" in page
        assert f"- Network: training/configs/quartznet_15x5.yaml with random weights, {precision}, " in page


def test_what_was_measured_before_a_failure_is_kept(monkeypatch, tmp_path, call):
    def fail(plan, config, engines, duration_s, batch):
        if batch == 2:
            raise KeyboardInterrupt
        return measure_cell(plan, config, engines, duration_s, batch)

    monkeypatch.setattr("carnelian_perf.inference.measure.measure_cell", fail)
    monkeypatch.chdir(ROOT)
    raw = tmp_path / "raw.json"
    words = "--engines onnx --durations 1 --batches 1,2 --steps 1 --warm-up 0 --published-model quartznet_15x5"
    assert call(main, "infer", CHECKPOINT, *words.split(), "--out", raw)[0] != 0
    kept = Measurement.read(raw)
    assert kept.plan == Plan(
        source=str(CHECKPOINT),
        random_weights=False,
        manifest="demo/clips/manifest.jsonl",
        engines=["onnx"],
        durations_s=[1.0],
        batches=[1, 2],
        steps=1,
        warm_up=0,
        threads=1,
    )
    assert [timing.batch for timing in kept.timings] == [1]
    assert "\n\n**Not finished.** " in render_page(kept, raw.name)
    assert "- Published avg: " in render_page(kept, raw.name)


def test_wav2vec2_is_timed_beside_the_published_rows(tmp_path):
    model = {"name": "wav2vec2", "conv_channels": [8, 8], "conv_kernels": [10, 8], "conv_strides": [8, 8]}
    model |= {"width": 8, "layers": 3, "heads": 2, "feed_forward": 16, "position_kernel": 8, "position_groups": 2}
    (tmp_path / "tiny.yaml").write_text(json.dumps({"name": "tiny", "model": model}))
    plan = make_plan(
        source=str(tmp_path / "tiny.yaml"),
        random_weights=True,
        engines=["eager", "onnx", "onnx_int8"],
        durations_s=[6.54],
        batches=[4],
        steps=1,
        warm_up=0,
        overrides=["model.hourglass={before: 1, pooled: 1, after: 1, factor: 2}"],
    )
    (measured,) = measure(plan, *load_network(tmp_path / "tiny.yaml", plan.overrides))
    eager, onnx, int8 = measured.timings
    assert eager.same_texts
    assert onnx.same_texts
    assert int8.network_cpu_ms  # with random weights, rounding decides which label is best
    published = A100 | {"model": "wav2vec2_base_hourglass", "precision": "bf16"}
    page = render_page(replace(measured, published=published), "raw.json")
    assert page.count("| 17.7 |") == 3
    with pytest.raises(ValueError, match="--set must go with a training YAML"):
        load_network(CHECKPOINT, ["model.hourglass={}"])


def test_a_folder_of_hugging_face_is_timed_without_the_engines_of_quartznet(monkeypatch, tmp_path, call):
    monkeypatch.chdir(ROOT)
    raw, words = tmp_path / "raw.json", "--durations 1 --batches 1 --steps 1 --warm-up 0"
    folder = ROOT / "tests/training/references/wav2vec2_large"
    status, _, err = call(main, "infer", folder, *words.split(), "--out", raw)
    assert status == 0, err
    assert [(timing.engine, timing.same_texts) for timing in Measurement.read(raw).timings] == [
        ("eager", True),
        ("onnx", True),
    ]


def test_engine_that_cannot_run_says_why():
    _, network = load_network(CHECKPOINT)
    with pytest.raises(EngineError, match="in ONNX Runtime this is measured in fp32 and fp16"):
        build_engine("onnx", network, "cpu", "bf16", 1)


def test_engine_that_fails_at_one_batch_is_recorded_beside_the_others():
    config, network = load_network(CHECKPOINT)
    plan = make_plan(engines=["plain", "onnx"], steps=2, warm_up=0)

    def fail(features, lengths):
        raise RuntimeError("out of memory: tried to allocate 7 GB\nand more words")

    engines = {"plain": fail, "onnx": build_engine("onnx", network, "cpu", "fp16", 1)}
    common, (plain, half) = measure_cell(plan, config, engines, 1.0, 1)
    assert plain.not_run == "failed: out of memory: tried to allocate 7 GB"
    assert plain.network_ms == []
    assert half.same_texts
    assert len(half.network_ms) == len(common.decoding_ms) == 2


def test_decoding_is_timed_on_what_the_first_engine_that_runs_gives(monkeypatch):
    config, network = load_network(CHECKPOINT)
    onnx = build_engine("onnx", network, "cpu", "fp32", 1)

    def blank(features, lengths):
        log_probs = np.full_like(onnx(features, lengths), -9.0)
        log_probs[..., -1] = 0.0
        return log_probs

    def fail(features, lengths):
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        asked.append(1)
        return blank(features, lengths)

    def time_letters(work):
        found = work()
        return found, float(len(found[0])) if isinstance(found, list) else 0.0, 0.0

    asked = []
    monkeypatch.setattr("carnelian_perf.inference.measure._time", time_letters)
    plan = make_plan(engines=["plain", "onnx", "eager"], durations_s=[3.0], steps=3, warm_up=0)
    engines = {"plain": fail, "onnx": onnx, "eager": blank}
    common, (plain, served, silent) = measure_cell(plan, config, engines, 3.0, 1)
    assert plain.not_run == "failed: out of memory"
    assert (served.same_texts, silent.same_texts) == (True, False)
    assert len(set(common.decoding_ms)) == 1
    assert len(common.decoding_ms) == 3
    assert common.decoding_ms[0] > 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes on a GPU")
def test_commands_for_a_gpu_are_right_but_for_the_gpu(monkeypatch, call):
    monkeypatch.chdir(ROOT)
    lines = subprocess.run(["make", "-n", "gpu-inference"], capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line)[1:] for line in lines.splitlines() if "carnelian-perf infer" in line]
    measured = {(Path(words[1]).stem, words[words.index("--precision") + 1]) for words in commands}
    assert measured == {(name, what) for name in ("quartznet_15x5", "jasper_10x5dr") for what in ("fp16", "tf32")}
    for words in commands:
        assert "tensorrt" in words[words.index("--engines") + 1].split(",")
        assert "PyTorch has a GPU" in call(main, *words)[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_engines_that_all_cannot_run_are_a_failure(tmp_path, call):
    words = "--engines graphs --durations 0.5 --batches 1 --steps 1 --warm-up 0"
    manifest = ROOT / "demo/clips/manifest.jsonl"
    raw = tmp_path / "raw.json"
    measured, out, _ = call(main, "infer", CHECKPOINT, *words.split(), "--manifest", manifest, "--out", raw)
    rendered, again, _ = call(main, "report", raw)
    assert (measured, rendered) == (1, 0)
    assert again == out
    assert "No engine ran, so no texts were compared." in out
    assert "Texts are equal" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_named():
    with pytest.raises(ValueError, match="PyTorch has a GPU"):
        check_device(make_plan(engines=["eager"], steps=1, warm_up=0, device="cuda"))
