"""`.nemo` files that are written for NeMo."""

import dataclasses
from pathlib import Path

import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.cli import main
from carnelian_training.foreign import nemo, nemo_archive, sources
from carnelian_training.weight_files import CheckpointError

REFERENCES = Path(__file__).parent / "references"


@pytest.mark.parametrize("name", ["quartznet", "jasper"])
def test_the_way_back_gives_the_same_file(tmp_path, name, caplog):
    config, weights = sources.read(REFERENCES / f"{name}.nemo", "same")
    assert nemo.write(tmp_path / "back.nemo", config, weights) == []
    tree, tensors = nemo_archive.read(tmp_path / "back.nemo")
    expected_tree, expected = nemo_archive.read(REFERENCES / f"{name}.nemo")
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(tensors[key], tensor, atol=1e-6, rtol=0)
    assert tree["encoder"]["feat_in"] == expected_tree["encoder"]["feat_in"]
    caplog.clear()
    assert sources.read(tmp_path / "back.nemo", "same")[0] == config
    assert not caplog.messages


def test_windows_are_as_many_samples_for_nemo(tmp_path, changed):
    """Of 1001, divided by the rate and multiplied again, 1000 whole ones are left."""
    config, weights = sources.read(REFERENCES / "quartznet.nemo", "same")
    for window, hop in [(1001, 1003), *((size, size) for size in range(2, 2000, 97))]:
        odd = changed(config, features={"window_samples": window, "hop_samples": hop, "fft_size": 2048})
        nemo.write(tmp_path / "odd.nemo", odd, weights)
        told = nemo_archive.read(tmp_path / "odd.nemo")[0]["preprocessor"]
        assert [int(told[name] * 16_000) for name in ("window_size", "window_stride")] == [window, hop]
    assert sources.read(tmp_path / "odd.nemo", "same")[0] == odd


def test_what_nemo_will_do_otherwise_is_told_or_refused(tmp_path, tiny_config, changed, call):
    model = checkpoint.build_model(tiny_config)
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, model.state_dict(), results={})
    target = tmp_path / "to" / "t.nemo"
    status, out, _ = call(main, "to-nemo", tmp_path / "tiny.pt", target)
    assert status == 0
    assert "`features.edges` is 'reflect', but NeMo has 'zero'" in out
    assert sources.read(target)[0].model == tiny_config.model
    two = changed(tiny_config, model={"head_frames": 2})
    with pytest.raises(CheckpointError, match="head_frames` must be 1"):
        nemo.write(tmp_path / "two.nemo", two, {})
    (stem, *others) = tiny_config.model.stages
    stages = (dataclasses.replace(stem, repeat=2), *others)
    strided = changed(tiny_config, model={"stages": stages})
    with pytest.raises(CheckpointError, match=r"`model\.stages\.0` must not have a stride and repeated"):
        nemo.write(tmp_path / "strided.nemo", strided, {})
