"""Files of older versions of NeMo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from carnelian_training.foreign import nemo, nemo_archive, sources
from carnelian_training.weight_files import CheckpointError

QUARTZNET = Path(__file__).parent / "references" / "quartznet.nemo"
PAGE = Path(__file__).parents[2] / "training" / "docs" / "checkpoints.md"
OLDER = ("features.edges=reflect", "features.frame_count=floor + 1")


@pytest.fixture
def write(tmp_path):
    """Writes `x.nemo`, with another version, options of the preprocessor and additional tensors."""

    def write(version, options=None, **added):
        tree, tensors = nemo_archive.read(QUARTZNET)
        tree["nemo_version"] = version
        tree["preprocessor"] |= options or {}
        nemo_archive.write(tmp_path / "x.nemo", tree, tensors | added)
        return tmp_path / "x.nemo"

    return write


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ("1.10.0", "NeMo 1.10 wrote its configuration"),
        ("2.4.0rc1", "NeMo 2.4 wrote its configuration"),
        (None, "it names no version of NeMo"),
        ("9" * 5000 + ".0", "it names no version of NeMo"),
    ],
)
def test_an_older_version_is_named_with_the_options_for_its_features(version, named, write, caplog):
    path = write(version)
    today = sources.read(path)[0].features
    assert (today.edges, today.frame_count) == ("zero", "floor")
    (line,) = caplog.messages
    assert f"x.nemo: {named}; before 2.5" in line
    options = re.findall(r"--set '?(\S+=[^'\s]+(?: \+ 1)?)", line)
    assert tuple(options) == OLDER
    caplog.clear()
    older = sources.read(path, overrides=tuple(options))[0].features
    assert (older.edges, older.frame_count) == ("reflect", "floor + 1")
    assert not caplog.messages


@pytest.mark.parametrize("version", ["2.5.0", "2.10.0", "3.0.0", 2.5])
def test_a_version_of_the_same_features_is_not_named(version, write, caplog):
    sources.read(write(version))
    assert not caplog.messages


BASIS = {f"{nemo.FEATURE_TENSORS}stft.forward_basis": torch.zeros(514, 1, 512)}


@pytest.mark.parametrize(
    ("version", "added", "is_named"), [(None, {}, True), ("1.7.0", BASIS, True), ("1.8.0", {}, False)]
)
def test_a_periodic_window_is_named(version, added, is_named, write, caplog):
    """The option made it so, until versions that only carry it along."""
    sources.read(write(version, {"stft_conv": True}, **added), overrides=OLDER)
    assert len(caplog.messages) == is_named
    assert all("`stft_conv` is true, so NeMo's window was periodic" in line for line in caplog.messages)


def halves(folder):
    """The two files of NeMo 0.x."""
    _, tensors = nemo_archive.read(QUARTZNET)
    for part, name in (("encoder", "JasperEncoder"), ("decoder", "JasperDecoderForCTC")):
        prefix = f"{part}."
        half = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        torch.save(half, folder / f"{name}-STEP-247400.pt")


def test_a_checkpoint_of_nemo_0_is_packed_as_the_page_says(tmp_path):
    halves(tmp_path)
    for name in ("JasperEncoder", "JasperDecoderForCTC"):
        with pytest.raises(
            CheckpointError, match=r"is half of a checkpoint of NeMo 0\.x, .* see `NeMo 0\.x` in training"
        ):
            sources.load_model(tmp_path / f"{name}-STEP-247400.pt")
    theirs, _ = nemo_archive.read(QUARTZNET)
    sections = {"AudioToMelSpectrogramPreprocessor": theirs["preprocessor"], "JasperEncoder": theirs["encoder"]}
    old = {"model": "QuartzNet", **sections, "labels": theirs["decoder"]["vocabulary"]}
    (tmp_path / "quartznet15x5.yaml").write_text(yaml.safe_dump(old))
    recipe = PAGE.read_text(encoding="utf-8").partition("## NeMo 0.x")[2]
    (program,) = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    subprocess.run(re.search(r"tar .*", recipe)[0].split(), cwd=tmp_path, check=True)
    config, weights = sources.read(tmp_path / "quartznet.nemo", "same")
    expected, expected_weights = sources.read(QUARTZNET, "same")
    assert config == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())


@pytest.mark.parametrize("wrap", [lambda tensors: tensors, lambda tensors: {"state_dict": tensors, "epoch": 1}])
def test_weights_without_their_configuration_are_named(wrap, tmp_path, caplog):
    torch.save(wrap(nemo_archive.read(QUARTZNET)[1]), tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"x\.ckpt must come with NeMo's configuration, but .* tar -cf x\.nemo"):
        sources.load_model(tmp_path / "x.ckpt")
    assert not caplog.messages
