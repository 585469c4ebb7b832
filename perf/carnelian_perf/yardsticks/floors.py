"""The least work of a training step or an inference, and the best rates at which this machine can do it."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import onnxruntime
import torch
from carnelian_export.graph.to_onnx import OPSET
from carnelian_training.checkpoint import build_model
from carnelian_training.config import Config
from carnelian_training.distributed import find_device
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.loop.finetune import frozen_stages
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.wav2vec2 import Attention, ConvLayer, PositionalConv
from carnelian_training.precision import DTYPES, allow_tf32
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

TRIED_S = 0.3
"""Seconds for which a kernel is repeated to find its best time."""


def find_floor(config: Config, duration_s: float, batch: int, precision: str) -> dict[str, float]:
    """Count operations and bytes of a step on `batch` clips of `duration_s` seconds.

    Operations: those of the convolutions and of wav2vec 2.0's linear layers and attention (a multiplication and an
    addition are two), once forward and, but where weights are frozen, twice backward. Bytes: going forward each of
    these reads its input and writes its result once, going backward twice as much, in the precision's own width; the
    weights move eight times in float32, five of them for the optimiser. All else (normalisation, activations, loss,
    what only pre-training adds) could be done on the way, or is little.

    Returns:
        `gflop` and `gbyte`.
    """
    frozen = frozen_stages(config, 0)
    network = _build_without_memory(config)
    operations, elements = _count_work(
        network, config, duration_s, lambda name: 1 if config.model.stage_of(f"{name}.weight") in frozen else 3
    )
    weights = sum(parameter.numel() for parameter in network.parameters())
    return {
        "gflop": batch * operations / 1e9,
        "gbyte": (batch * elements * DTYPES[precision].itemsize + 8 * weights * 4) / 1e9,
    }


def count_operations(config: Config, duration_s: float) -> int:
    """Count the operations of :func:`find_floor` in the forward pass of one clip."""
    return _count_work(_build_without_memory(config), config, duration_s, lambda name: 1)[0]


def count_frames(config: Config, duration_s: float) -> int:
    """Count the frames that go into the network, or the samples if it takes a waveform."""
    return round(duration_s * SAMPLE_RATE_HZ / config.features.hop_samples)


def _build_without_memory(config: Config) -> CtcNetwork:
    with torch.device("meta"):
        return build_model(replace(config, pretraining=None)).eval()


def _count_work(
    network: CtcNetwork, config: Config, duration_s: float, passes_of: Callable[[str], int]
) -> tuple[int, int]:
    """Count the operations on one clip, and the elements that are read and written, weights left out.

    `passes_of` tells of a module's name how many times its forward pass counts.
    """
    operations = elements = 0

    def count(
        passes: int, module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor | tuple[Tensor, Tensor]
    ) -> None:
        nonlocal operations, elements
        result = result[0] if isinstance(result, tuple) else result
        if isinstance(module, Attention):  # products between frames; those with weights are linear layers
            operations += passes * 4 * result.numel() * result.shape[1]
            return
        weight: Tensor = module.direction if isinstance(module, PositionalConv) else module.weight  # type: ignore[assignment]
        operations += passes * 2 * result.numel() // weight.shape[0] * weight.numel()
        elements += passes * (inputs[0].numel() + result.numel())

    for name, module in network.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, ConvLayer, PositionalConv, Attention)):
            module.register_forward_hook(partial(count, passes_of(name)))
    features = torch.empty(1, network.config.feature_channels, count_frames(config, duration_s), device="meta")
    network(features, torch.empty(1, dtype=torch.int64, device="meta"))
    return operations, elements


def measure_peak(precision: str) -> float:
    """Measure the best rate of a 1x1 convolution in GFLOP/s: most of a step's operations are such.

    It is the best rate, not the median, because it stands for what the machine can do when nothing disturbs it; and the
    better one of PyTorch's convolution and matrix product, which with AMX is several times as fast.
    """
    device = find_device()
    batch, channels = (512, 2048) if device.type == "cuda" else (64, 512)
    allow_tf32(precision)
    dtype = DTYPES[precision]
    x = torch.randn(batch, channels, 1, 64, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 1, 1, device=device, dtype=dtype)
    rows, matrix = x.permute(0, 2, 3, 1), weight.flatten(1)
    ways = (lambda: F.conv2d(x, weight), lambda: F.linear(rows, matrix))
    return 2 * x.numel() * channels / min(_best_s(way, device) for way in ways) / 1e9


def measure_onnx_peak(threads: int) -> float:
    """Measure the best rate of a 1x1 convolution of QuartzNet in ONNX Runtime on the CPU, in float32 GFLOP/s."""
    channels, frames = 512, 835
    weight = numpy_helper.from_array(np.ones((channels, channels, 1, 1), np.float32), "weight")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 1, frames]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Conv", ["x", "weight"], ["y"])], "peak", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"x": np.ones((1, channels, 1, frames), np.float32)}
    best_s = _best_s(lambda: session.run(None, feeds), torch.device("cpu"))
    return 2 * channels * channels * frames / best_s / 1e9


def measure_bandwidth() -> float:
    """Measure the best rate of copying far more than caches hold, in GB/s read and written."""
    device = find_device()
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _best_s(lambda: target.copy_(source), device) / 1e9


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    deadline = time.perf_counter() + TRIED_S
    while len(times) < 3 or time.perf_counter() < deadline:
        started = _clock_s(device)
        work()
        times.append(_clock_s(device) - started)
    return min(times)


def _clock_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    # CPU time leaves out what other processes take of the core. With several threads it is counted late, so that the
    # best of many times would come out at half of the true one.
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
