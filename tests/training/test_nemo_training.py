"""Checkpoints of NeMo's training, which PyTorch Lightning writes."""

import gc
from pathlib import Path

import pytest
import torch
from carnelian_training.foreign import nemo_archive, sources
from carnelian_training.weight_files import CheckpointError

QUARTZNET = Path(__file__).parent / "references" / "quartznet.nemo"


class DictConfig:
    """Stands where OmegaConf's class stands in such a file: of another module, its content in its state."""

    def __init__(self, content):
        self._content = content


def test_checkpoints_of_nemos_training_are_read(tmp_path):
    """PyTorch Lightning's `.ckpt`, whose configuration is an object of a package that is not here."""
    tree, tensors = nemo_archive.read(QUARTZNET)
    content = {"epoch": 3, "state_dict": tensors, "hyper_parameters": DictConfig({"cfg": DictConfig(tree)})}
    torch.save(content, tmp_path / "last.ckpt")
    config, model = sources.load_model(tmp_path / "last.ckpt")
    expected, weights = sources.read(QUARTZNET, "last")
    assert config == expected
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    torch.save(content | {"hyper_parameters": None}, tmp_path / "bare.ckpt")
    with pytest.raises(CheckpointError, match=r"bare\.ckpt must hold NeMo's configuration in `hyper_parameters`"):
        sources.read(tmp_path / "bare.ckpt")


def test_the_first_reading_of_a_foreign_checkpoint_is_let_go_before_the_second(tmp_path, monkeypatch):
    """Both at once need twice the memory; even a failed reading holds its tensors as long as its error lives."""
    size = 12_347
    torch.save({"state_dict": {"a": torch.zeros(size)}, "hyper_parameters": DictConfig({})}, tmp_path / "last.ckpt")

    def count(*_):
        return sum(type(item) is torch.Tensor and item.numel() == size for item in gc.get_objects())

    monkeypatch.setattr(sources, "_load_foreign", count)
    assert sources.load_model(tmp_path / "last.ckpt") == 0
