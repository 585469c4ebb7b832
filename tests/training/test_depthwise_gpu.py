import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carnelian_training.config import config_from_dict
from carnelian_training.distributed import Process
from carnelian_training.loop.state import new_state

FOLDER = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="PyTorch's CUDA build brings Triton; beside its CPU build, `pip install triton` for this test",
)


def run(script, *arguments, **environment):
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_kernels_give_the_results_and_gradients_of_a_plain_convolution():
    run("interpret_depthwise.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_and_spill_no_registers(capability, tmp_path):
    run("compile_depthwise.py", capability, TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")


def test_without_a_gpu_the_kernels_are_refused():
    tree = {"name": "x", "model": {"name": "quartznet", "stages": [{"filters": 8, "kernel": 3, "residual": False}]}}
    config = config_from_dict({**tree, "loop": {"depthwise": "triton"}}, "test")
    with pytest.raises(ValueError, match="must run on a GPU"):
        new_state(config, Process(torch.device("cpu")))
