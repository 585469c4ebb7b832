"""Weights of Hugging Face's folders: damaged ones, pointers, programs, wrappers and shards."""

import json
import shutil
import tarfile

import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.foreign import sources
from carnelian_training.weight_files import CheckpointError
from safetensors.torch import load_file, save_file


def test_weights_that_are_no_numbers_are_named(hf_folder, tmp_path):
    """They gave empty transcripts, and a fine-tuning whose every step was skipped."""
    config, weights = sources.read(hf_folder, "x")
    tensors = load_file(hf_folder / "model.safetensors")
    tensors["lm_head.bias"][4] = float("inf")
    save_file(tensors, hf_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"  lm_head\.bias: holds numbers that are not finite"):
        sources.read(hf_folder)
    weights["head.bias"][1] = float("nan")
    checkpoint.save(tmp_path / "x.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"(?s)x\.pt: 1 tensor\(s\) .*  head\.bias: holds .* not finite"):
        checkpoint.load_model(tmp_path / "x.pt")


@pytest.mark.parametrize("rows", [7, 20])
def test_a_heads_bias_has_as_many_numbers_as_its_weight(hf_folder, rows):
    """One of as many as there are labels, with the blank, was taken to be in their order."""
    tensors = load_file(hf_folder / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(rows)}, hf_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lm_head\.bias: must be \[10\], but is \[{rows}\]"):
        sources.read(hf_folder)


def test_a_head_without_its_weight_is_named(hf_folder):
    """The vocabulary was said to be wrong."""
    tensors = load_file(hf_folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, hf_folder / "model.safetensors")
    advice = (
        r"save it as a Wav2Vec2ForCTC or HubertForCTC \(`\.from_pretrained\(\.\.\.\)\.save_pretrained\(\.\.\.\)`\)$"
    )
    with pytest.raises(
        CheckpointError, match=rf"has neither `lm_head\.weight` nor `quantizer`; a body alone .* {advice}"
    ):
        sources.read(hf_folder)


@pytest.mark.parametrize("name", ["x.ckpt", "x.nemo", "x/pytorch_model.bin"])
def test_weights_without_their_checksum_are_named(hf_folder, tmp_path, name):
    """`torch.load` would take them."""
    torch.save(load_file(hf_folder / "model.safetensors"), tmp_path / "whole")
    (hf_folder / "model.safetensors").unlink()
    rotten = bytearray((tmp_path / "whole").read_bytes())
    rotten[len(rotten) // 2] ^= 1
    (tmp_path / name).write_bytes(rotten)
    if name == "x.nemo":
        (tmp_path / "model_weights.ckpt").write_bytes(rotten)
        (tmp_path / "model_config.yaml").write_text("{}")
        with tarfile.open(tmp_path / name, "w") as archive:
            for part in ("model_config.yaml", "model_weights.ckpt"):
                archive.add(tmp_path / part, part)
    with pytest.raises(CheckpointError, match=r"x\S* is damaged: \S+ does not have its checksum"):
        sources.read(hf_folder if name.startswith("x/") else tmp_path / name)


@pytest.mark.parametrize("name", ["x.pt", "x.nemo", "x/model.safetensors", "x/pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(hf_folder, tmp_path, name):
    (hf_folder / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 377607901\n")
    path = hf_folder if name.startswith("x/") else tmp_path / name
    for read in (sources.read, sources.load_model):
        with pytest.raises(CheckpointError, match=r"is a pointer of Git LFS: fetch them, `git lfs pull`"):
            read(path)


class Program(torch.nn.Module):
    """Writes a file where it is loaded by `torch.jit.load`."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self):
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):
        self.path, self.training = state
        torch.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of one category in PyTorch 2.13, of another in 2.14
def test_a_program_is_not_run(hf_folder, tmp_path):
    """`torch.load` handed such files to `torch.jit.load`, which runs them."""
    torch.jit.script(Program(str(tmp_path / "written"))).save(tmp_path / "x.pt")
    (hf_folder / "model.safetensors").unlink()
    shutil.copy(tmp_path / "x.pt", hf_folder / "pytorch_model.bin")
    for path in (tmp_path / "x.pt", hf_folder):
        for read in (sources.read, sources.load_model):
            with pytest.raises(CheckpointError, match="must hold weights, but is a TorchScript program"):
                read(path)
    assert not (tmp_path / "written").exists()
    torch.jit.load(tmp_path / "x.pt")
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize(("before", "after"), [("", "module."), ("wav2vec2.", "wav2vec2._orig_mod.")])
def test_a_model_that_was_saved_inside_of_a_wrapper_is_read_too(hf_folder, before, after):
    expected = sources.read(hf_folder)[1]
    tensors = load_file(hf_folder / "model.safetensors")
    save_file({name.replace(before, after, 1): t for name, t in tensors.items()}, hf_folder / "model.safetensors")
    found = sources.read(hf_folder)[1]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_shards_are_read(hf_folder, file):
    expected = sources.read(hf_folder)[1]
    tensors = load_file(hf_folder / "model.safetensors")
    (hf_folder / "model.safetensors").unlink()
    names = sorted(tensors)
    stem, suffix = file.split(".")
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"{stem}-{i:05d}-of-00002.{suffix}"
        where |= dict.fromkeys(part, shard)
        (save_file if suffix == "safetensors" else torch.save)(
            {name: tensors[name] for name in part}, hf_folder / shard
        )
    (hf_folder / f"{file}.index.json").write_text(json.dumps({"weight_map": where}))
    found = sources.read(hf_folder)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (hf_folder / f"{stem}-00002-of-00002.{suffix}").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*: its weights cannot be read"):
        sources.read(hf_folder)
    (hf_folder / f"{file}.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold `weight_map`"):
        sources.read(hf_folder)
