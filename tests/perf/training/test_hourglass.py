"""Training steps of an Hourglass beside the plain transformer; tiny, for what it writes and not for its numbers."""

import json

import pytest
from carnelian_perf.cli import main
from carnelian_perf.machine import name_gpu
from carnelian_perf.training.hourglass import hourglass_of, measure
from carnelian_perf.training.hourglass_results import Measurement, Work, render_page
from carnelian_training.config import config_from_dict
from carnelian_training.distributed import find_device
from carnelian_training.loop.train import optimise
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config

MODEL = {"name": "wav2vec2", "conv_channels": [8, 8], "conv_kernels": [10, 8], "conv_strides": [8, 8]}
MODEL |= {"width": 8, "layers": 4, "heads": 2, "feed_forward": 16, "position_kernel": 8, "position_groups": 2}


def test_the_table_sets_each_factor_beside_the_plain_transformer(tmp_path):
    tree = {"name": "tiny", "model": MODEL, "pretraining": {"groups": 2, "codes": 4, "code_width": 4, "width": 4}}
    tree["augment"] = {"speed": [1.0, 1.0], "spans": {"time_probability": 0.5}}
    tree["optimizer"] = {"name": "adamw", "betas": [0.9, 0.98]}
    *_, measured = measure(config_from_dict(tree, "here"), [2, 4, 8], Work(2, 1.0, 2))
    measured.write(tmp_path / "tiny_hourglass.json")
    forms = measured.forms
    assert [form.factor for form in forms] == [1, 2, 4, 8]
    assert all(len(form.wall_s) == len(form.cpu_s) == 2 for form in forms)
    assert forms[0].kept_bytes > forms[1].kept_bytes > forms[2].kept_bytes > forms[3].kept_bytes > 0
    measurement = Measurement.read(tmp_path / "tiny_hourglass.json")
    assert measurement.objective == "pre-training"
    assert measurement.machine["accelerator"] == name_gpu(find_device().type)
    table = render_page(measurement, "tiny_hourglass.json")
    assert [line.split(" |")[0] for line in table.splitlines()[4:8]] == [
        *("| plain", "| factor 2", "| factor 4", "| factor 8")
    ]
    assert "| 1.37 |" in table
    assert table.splitlines()[7].count("| - |") == 2  # nobody published 8
    assert f"torch {measurement.versions['torch']}" in table
    assert "[tiny_hourglass.json](tiny_hourglass.json)" in table


def test_steps_that_were_taken_before_an_interruption_are_kept(tmp_path, call, monkeypatch):
    taken = []

    def interrupt(*arguments):
        taken.append(arguments)
        if len(taken) == 5:  # both forms warm up, and take their first steps
            raise KeyboardInterrupt
        return optimise(*arguments)

    monkeypatch.setattr("carnelian_perf.training.step.optimise", interrupt)
    tree = {"name": "tiny", "model": MODEL, "optimizer": {"name": "adamw", "betas": [0.9, 0.98]}}
    (tmp_path / "tiny.yaml").write_text(json.dumps(tree))
    raw = tmp_path / "raw.json"
    words = "--factors 2 --duration 1 --steps 3"
    assert call(main, "hourglass", tmp_path / "tiny.yaml", *words.split(), "--out", raw)[0] != 0
    kept = Measurement.read(raw)
    assert [(len(form.wall_s), form.kept_bytes > 0) for form in kept.forms] == [(1, True), (1, True)]
    page = render_page(kept, raw.name)
    assert "\n\n**Not finished.** " in page
    assert "\n\nMedians of 1 step of " in page


def test_two_thirds_of_the_layers_are_pooled_as_published():
    pooled = hourglass_of(Wav2Vec2Config(), 4)
    assert (pooled.before, pooled.pooled, pooled.after, pooled.factor) == (2, 8, 2, 4)
    assert hourglass_of(Wav2Vec2Config(), 1) is None


def test_other_networks_are_refused():
    config = config_from_dict(
        {"name": "q", "model": {"name": "quartznet", "stages": [{"filters": 8, "kernel": 3}]}}, "here"
    )
    with pytest.raises(ValueError, match=r"`model\.name` must be wav2vec2, .* but is quartznet in q; give a YAML"):
        next(measure(config, [2], Work(1, 1.0, 1)))
