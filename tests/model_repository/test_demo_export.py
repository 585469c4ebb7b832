"""What is checked in is what `carnelian-export` writes for the checked-in checkpoint."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from carnelian_export.repository import write_model
from carnelian_export.stages import Decoding
from carnelian_training.checkpoint import load_model
from carnelian_training.language_models.weights import read_weights
from onnx import numpy_helper

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"
CHECKPOINT = ROOT / "demo" / "quartznet_demo.pt"
WEIGHTS = "quartznet_demo_acoustic/1/model.onnx"
MAX_BYTES = 30 * 1024**2


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    decoder = REPOSITORY / "quartznet_demo_ctc" / "1"
    decoding = Decoding(
        language_model=decoder / "english.klm",
        options=read_weights(ROOT / "demo" / "lm_weights.json", decoder / "english.klm", decoder / "english.onnx"),
        calibration=ROOT / "demo" / "calibration.json",
        neural_language_model=decoder / "english.onnx",
    )
    write_model(folder, "quartznet_demo", *load_model(CHECKPOINT), decoding)
    return folder


def files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(str(path.relative_to(folder)) for path in paths)


def test_an_export_has_the_files_that_are_checked_in(exported, shipped):
    assert files(exported) == [name for name in files(shipped) if "/" in name]


def test_all_files_but_the_network_are_equal_byte_by_byte(exported):
    for name in set(files(exported)) - {WEIGHTS}:
        assert (REPOSITORY / name).read_bytes() == (exported / name).read_bytes(), name


def test_the_network_has_the_same_kinds_of_nodes_and_weights(exported):
    # Node names and order may differ between versions of PyTorch; kinds, weights and tensors may not.
    first, second = (onnx.load(folder / WEIGHTS).graph for folder in (REPOSITORY, exported))
    assert [tensor.name for tensor in first.input] == [tensor.name for tensor in second.input]
    assert [tensor.name for tensor in first.output] == [tensor.name for tensor in second.output]
    assert Counter(node.op_type for node in first.node) == Counter(node.op_type for node in second.node)
    weights, others = ({t.name: numpy_helper.to_array(t) for t in g.initializer if t.dims} for g in (first, second))
    assert set(weights) == set(others)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


def test_checkpoint_and_weights_are_small_enough_to_check_in():
    assert CHECKPOINT.stat().st_size + (REPOSITORY / WEIGHTS).stat().st_size < MAX_BYTES
