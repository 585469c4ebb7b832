import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton, which is there for Linux alone",
)


def run(script, *arguments, **environment):
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_kernels_give_the_results_and_gradients_of_a_plain_convolution():
    run("interpret_depthwise.py", TRITON_INTERPRET="1")


@needs_triton
def test_kernels_compile_for_gpus_and_spill_no_registers(tmp_path):
    run("compile_depthwise.py", 80, 90, TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CUDA_VISIBLE_DEVICES=0")
def test_kernels_give_the_results_and_gradients_of_a_plain_convolution_on_a_gpu():
    run("interpret_depthwise.py", "cuda")
