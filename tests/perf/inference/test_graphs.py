import copy
import json

import numpy as np
import pytest
import torch
from carnelian_export.graph.precision import lower
from carnelian_perf.inference import graphs
from carnelian_perf.inference.engines import build_engine
from carnelian_training.checkpoint import build_model
from carnelian_training.config import config_from_dict
from carnelian_training.precision import allow_tf32
from torch.nn import functional as F

QUARTZNET = [
    {"filters": 16, "kernel": 5, "stride": 2, "residual": False},
    {"filters": 16, "kernel": 7, "blocks": 2, "repeat": 2},
    {"filters": 24, "kernel": 7, "dilation": 2, "residual": False},
    {"filters": 24, "kernel": 1, "residual": False, "separable": False},
]
STRIDED = [
    {"filters": 16, "kernel": 1, "stride": 2, "residual": False, "separable": False},
    {"filters": 16, "kernel": 5, "blocks": 2},
]
JASPER = [{**stage, "separable": False} for stage in QUARTZNET]
MODELS = [
    {"name": "quartznet", "stages": QUARTZNET},
    {"name": "quartznet", "stages": STRIDED},
    {"name": "jasper", "stages": JASPER, "dense": False},
    {"name": "jasper", "stages": JASPER},
]


def network_of(model):
    """With batch norms that do something."""
    torch.manual_seed(0)
    network = build_model(config_from_dict({"name": "x", "model": model}, "test")).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network


def batch():
    return torch.randn(2, 64, 130, generator=torch.Generator().manual_seed(0)), torch.tensor([130, 81])


def assert_same(found, expected, tolerance):
    for row, frames in enumerate((65, 41)):
        torch.testing.assert_close(found[row, :frames], expected[row, :frames], rtol=0, atol=tolerance)


@pytest.mark.parametrize("model", MODELS, ids=json.dumps)
def test_fused_blocks_compute_what_the_network_does(model, monkeypatch):
    # cuDNN's two functions by their definition, for it has none on a CPU.
    monkeypatch.setattr(torch, "cudnn_convolution_relu", lambda x, w, b, *how: F.conv2d(x, w, b, *how).relu())
    monkeypatch.setattr(
        torch, "cudnn_convolution_add_relu", lambda x, w, z, alpha, b, *how: (F.conv2d(x, w, b, *how) + z).relu()
    )
    network = network_of(model)
    fused = copy.deepcopy(lower(network, torch.float32))
    graphs.fuse(fused)
    with torch.inference_mode():
        assert_same(fused(*batch())[0], network(*batch())[0], 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CUDA_VISIBLE_DEVICES=0")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 0.03)])
@pytest.mark.parametrize("model", MODELS, ids=json.dumps)
def test_graphs_compute_what_the_network_does_on_a_gpu(model, precision, tolerance):
    allow_tf32(precision)
    network = network_of(model)
    run = build_engine("graphs", network, "cuda", precision, 1)
    features, lengths = batch()
    with torch.inference_mode():
        expected = network(features, lengths)[0]
    for _ in range(2):  # the first captures
        found = run(features.numpy(), lengths.numpy().astype(np.int32))
        assert_same(torch.from_numpy(found), expected, tolerance)
