"""Graphs beside the networks that they were made of."""

import copy
from pathlib import Path

import onnx
import pytest
import torch
from carnelian_export import parity
from carnelian_export.graph.to_onnx import export_ragged
from carnelian_export.parity import ParityError, check_parity
from carnelian_export.repository import write_model
from carnelian_export.target import Target
from carnelian_training.checkpoint import load_model

DEMO = Path(__file__).parents[2] / "demo/quartznet_demo.pt"


def test_a_graph_with_other_weights_is_refused_with_the_numbers(tmp_path, config, network):
    onnx.save(export_ragged(network), tmp_path / "model.onnx")
    check_parity(tmp_path / "model.onnx", network)
    with torch.no_grad():
        network.head.bias += torch.linspace(0, 0.01, 29)
    with pytest.raises(ParityError, match=r"must be within 0\.001 of PyTorch's, .* but differ by 0\.0\d+"):
        check_parity(tmp_path / "model.onnx", network)


def test_a_graph_that_gives_no_numbers_is_refused(tmp_path, network, clips):
    spoilt = copy.deepcopy(network)
    with torch.no_grad():
        spoilt.head.bias[0] = torch.nan
    onnx.save(export_ragged(spoilt), tmp_path / "model.onnx")
    with pytest.raises(ParityError, match="but differ by nan"):
        check_parity(tmp_path / "model.onnx", network)
    with pytest.raises(ParityError, match=r"of int8 .* but differ by nan"):
        parity.check_distributions(tmp_path / "model.onnx", network, clips)


@pytest.mark.parametrize(
    ("num_clips", "row", "tensor"),
    [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (len(parity.SHAPES), 1, 0), (len(parity.SHAPES), 1, 1)],
)
def test_a_single_wrong_number_in_batches_of_one_size_is_refused(tmp_path, network, num_clips, row, tensor):
    onnx.save(export_ragged(network), tmp_path / "model.onnx")
    session = parity.open_graph(tmp_path / "model.onnx")

    def score(clips, lengths):
        answer = [values.copy() for values in parity.run(session, clips, lengths)]
        if len(clips) == num_clips:
            answer[tensor][row].flat[0] += (0.05, 1)[tensor]
        return tuple(answer)

    message = (r"must be within 0\.001 of .* by 0\.0\d+", "LOG_PROB_LENGTH must be")
    with pytest.raises(ParityError, match=message[tensor]):
        parity.compare(score, network, "fp32", "the graph")


def test_a_model_that_fails_parity_is_not_written(tmp_path, config, network, monkeypatch):
    monkeypatch.setitem(parity.TOLERANCES, "fp32", parity.Tolerance(0.0, 0.0))
    with pytest.raises(ParityError, match=r"^tiny_acoustic in ONNX Runtime: "):
        write_model(tmp_path / "r", "tiny", config, network)
    assert not (tmp_path / "r").exists()


def test_a_wrong_weight_is_refused_in_float16_too(tmp_path, network):
    onnx.save(export_ragged(network, torch.float16), tmp_path / "model.onnx")
    check_parity(tmp_path / "model.onnx", network, "fp16")
    with torch.no_grad():
        network.head.bias += torch.linspace(0, 0.3, 29)
    with pytest.raises(ParityError, match=r"of fp16 .* 0\.05 in the mean, but differ by .*; export in fp32$"):
        check_parity(tmp_path / "model.onnx", network, "fp16")


def test_a_trained_network_is_exported_in_float16_and_wrong_weights_of_it_are_refused(tmp_path):
    """It gives some labels -131, where the steps of float16 are 0.1."""
    config, network = load_model(DEMO)
    difference = write_model(tmp_path, "demo", config, network, target=Target(precision="fp16"))
    assert difference <= parity.TOLERANCES["fp16"].worst  # as it is told
    with torch.no_grad():
        network.head.bias += torch.linspace(0, 0.35, len(network.head.bias))
    with pytest.raises(ParityError, match=r"of fp16 .* by 0\.\d+, and 0\.06\d+ in the mean .* below -50, times"):
        check_parity(tmp_path / "demo_acoustic" / "1" / "model.onnx", network, "fp16")


def test_an_unlikely_label_that_is_far_off_is_refused(tmp_path, network):
    with torch.no_grad():
        network.head.bias[3] = -500
    onnx.save(export_ragged(network), tmp_path / "model.onnx")
    check_parity(tmp_path / "model.onnx", network)
    with torch.no_grad():
        network.head.bias[3] = -501
    with pytest.raises(ParityError, match=r"within 0\.001 of .* but differ by 0\.0[89]"):
        check_parity(tmp_path / "model.onnx", network)
