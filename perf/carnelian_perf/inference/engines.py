"""Ways to run a network without a server: what `carnelian-perf infer` compares.

Each is a function from a padded batch, features [rows, num_mels, frames] and lengths [rows], to log-probabilities
[rows, frames', labels] as a NumPy array on the CPU.
"""

import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from carnelian_export.acoustic import save
from carnelian_export.engine import EngineError, EngineRun, load_tensorrt
from carnelian_export.engine import build_engine as build_plan
from carnelian_export.graph.precision import lower
from carnelian_export.graph.quantise import quantise
from carnelian_export.graph.shaped import export_shaped
from carnelian_export.graph.to_onnx import INPUTS, OPSET, OUTPUTS, export_ragged
from carnelian_export.profiles import SHAPED_INPUTS, Profile, shapes_of
from carnelian_serving.backends.onnxruntime.providers import load_cuda
from carnelian_serving.backends.onnxruntime.spinning import limit_spinning
from carnelian_serving.backends.parts import MAX_RUN_ELEMENTS, split
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.loop.state import MOST_VERSIONS
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.quartznet import QuartzNet
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.precision import DTYPES, autocast
from torch import Tensor, nn

from carnelian_perf.inference.graphs import run_graphs
from carnelian_perf.inference.results import GPU_ONLY
from carnelian_perf.yardsticks.plain import PlainQuartzNet

Array = npt.NDArray[np.float32]
Engine = Callable[[Array, npt.NDArray[np.int32]], Array]
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
ON_CPU, ON_GPU = "CPUExecutionProvider", "CUDAExecutionProvider"
ONNX_PRECISIONS = {"onnx": ("fp32", "fp16"), "onnx_conv1d": ("fp32",), "onnx_int8": ("fp32",)}


def build_engine(name: str, network: CtcNetwork, device: str, precision: str, threads: int) -> Engine:
    """Build an engine that runs a network.

    Args:
        name: A key of :data:`carnelian_perf.inference.results.TITLES`.
        network: The network, in evaluation mode, on the CPU.
        device: cpu or cuda.
        precision: One of :data:`carnelian_perf.options.PRECISIONS`. `plain` and `eager` use it by autocast; in the
            other engines, batch norms are folded and weights are in that precision.
        threads: Number of CPU threads.

    Raises:
        EngineError: The engine does not support this network, device or precision.
    """
    if name in GPU_ONLY and device == "cpu":
        raise EngineError("no GPU")
    dtype = DTYPES[precision]
    if name.startswith("onnx"):
        if precision not in ONNX_PRECISIONS[name]:
            raise EngineError(f"in ONNX Runtime this is measured in {' and '.join(ONNX_PRECISIONS[name])}")
        provider = _find_provider(device)  # before the export, which may take a minute
        if name == "onnx_conv1d":
            return _run_padded(open_session(_export_plain(_make_plain(network)), provider, threads))
        graph = export_ragged(network, dtype) if name == "onnx" else _quantise(network)
        run = _run_ragged(open_session(graph, provider, threads), isinstance(network, Wav2Vec2))
        return _in_parts(run) if device == "cpu" else run
    if name == "tensorrt":
        return _run_tensorrt(network, precision)
    if name == "graphs":
        return run_graphs(lower(network, dtype).to(device), dtype)
    if name.startswith("compiled"):
        lowered = lower(network, dtype).to(device)
        mode = "reduce-overhead" if name in GPU_ONLY else None
        # All engines compile versions of the same functions. By default PyTorch compiles 8 and runs others uncompiled.
        torch._dynamo.config.cache_size_limit = MOST_VERSIONS
        torch._dynamo.config.fail_on_cache_limit_hit = True
        compiled = cast("Forward", torch.compile(lowered, mode=mode))
        return _run_torch(lambda batch, ends: compiled(batch.to(dtype), ends), device)
    if name == "plain":
        module: nn.Module = _make_plain(network)
    else:
        module = network if device == "cpu" else copy.deepcopy(network)  # others need it on the CPU
    return _run_torch(module.to(device), device, precision)


def _quantise(network: CtcNetwork) -> onnx.ModelProto:
    """Quantise a network to int8 with scales from noise, which are wrong for speech but as fast as right ones."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((network.config.feature_channels, 200), np.float32)
    return quantise(network, [noise])


def _make_plain(network: CtcNetwork) -> PlainQuartzNet:
    if not isinstance(network, QuartzNet):
        raise EngineError("the baseline is a QuartzNet")
    return PlainQuartzNet.of(network).eval()


def _run_torch(forward: Forward, device: str, precision: str = "fp32") -> Engine:
    @torch.inference_mode()
    def run(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        batch, ends = torch.from_numpy(features).to(device), torch.from_numpy(lengths).long().to(device)
        with autocast(torch.device(device), precision):
            log_probs, _ = forward(batch, ends)
        return log_probs.float().cpu().numpy()  # waits for the GPU

    return run


def _export_plain(plain: PlainQuartzNet) -> onnx.ModelProto:
    """Export as NeMo does: `Conv1d`, batch norms folded, and no masks, because every row is taken to be full."""
    features = torch.zeros(2, plain.config.num_mels, 64)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # The tracer warns that it is deprecated, and that it takes the masks for full; both are intended.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _WithoutLengths(plain).eval(),
            (features,),
            buffer,  # type: ignore[arg-type]
            input_names=["FEATURES"],
            output_names=["LOG_PROBS"],
            dynamic_axes={"FEATURES": {0: "rows", 2: "frames"}, "LOG_PROBS": {0: "rows", 1: "output_frames"}},
            opset_version=OPSET,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue())


class _WithoutLengths(nn.Module):
    def __init__(self, plain: PlainQuartzNet) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, features: Tensor) -> Tensor:
        lengths = torch.full((features.shape[0],), features.shape[2])
        log_probs: Tensor = self.plain(features, lengths)[0]
        return log_probs


def open_session(graph: onnx.ModelProto, provider: str, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph in ONNX Runtime, with the server's settings.

    Raises:
        EngineError: ONNX Runtime cannot load the provider.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # The server has the same setting.
    options.enable_mem_pattern = False
    limit_spinning(options)
    settings = {}
    if provider == ON_GPU:
        settings = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
        load_cuda()
    with tempfile.TemporaryDirectory() as scratch:  # ONNX Runtime loads a graph over 2 GiB only by path
        path = Path(scratch) / "model.onnx"
        save(graph, path)
        session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, settings)])
    if session.get_providers()[0] != provider:  # its libraries are missing; ONNX Runtime goes on without it
        raise EngineError(f"ONNX Runtime cannot load {provider}; install the CUDA and cuDNN that its log asks for")
    return session


def _find_provider(device: str) -> str:
    wanted = ON_GPU if device == "cuda" else ON_CPU
    if wanted not in onnxruntime.get_available_providers():
        raise EngineError(f"ONNX Runtime has no {wanted}; install onnxruntime-gpu in place of onnxruntime")
    return wanted


def _run_ragged(session: onnxruntime.InferenceSession, of_samples: bool) -> Engine:
    def run(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        values = _make_ragged(features, lengths, of_samples)
        return cast("Array", session.run(OUTPUTS[:1], dict(zip(INPUTS, values, strict=True)))[0])

    return run


def _make_ragged(features: Array, lengths: npt.NDArray[np.int32], of_samples: bool) -> tuple[npt.NDArray[Any], ...]:
    """Convert a padded batch to the ragged graph's inputs, in the order of :data:`INPUTS`."""
    shapes = np.tile(np.array(features.shape[2 if of_samples else 1 :], np.int32), (len(features), 1))
    return features.reshape(-1), shapes, lengths[:, None]


def _in_parts(run: Engine) -> Engine:
    """Split large batches into several runs, as the server does."""

    def run_parts(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        parts = split([features[0].size] * len(features), MAX_RUN_ELEMENTS)
        return np.concatenate([run(features[part], lengths[part]) for part in parts])

    return run_parts


def _run_padded(session: onnxruntime.InferenceSession) -> Engine:
    def run(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        return cast("Array", session.run(["LOG_PROBS"], {"FEATURES": features})[0])

    return run


def _run_tensorrt(network: CtcNetwork, precision: str) -> Engine:
    """Run in TensorRT, with a plan for each shape of batch; the first step of a shape builds it."""
    load_tensorrt()
    graph, of_samples = export_shaped(network, DTYPES[precision], hop_samples=1), isinstance(network, Wav2Vec2)

    @functools.lru_cache(maxsize=1)  # all batches of a shape come one after another
    def build(rows: int, channels: int, length: int) -> EngineRun:
        seconds = length / SAMPLE_RATE_HZ  # with a hop of 1, frames count as samples do
        profile = Profile(rows=rows, seconds=seconds, most_s=rows * seconds)
        num_mels = None if of_samples else channels
        return EngineRun(build_plan(graph, [shapes_of(profile, rows, num_mels, 1)], tf32=precision != "fp32"))

    def run(features: Array, lengths: npt.NDArray[np.int32]) -> Array:
        size = features[0].size
        shape_only = (np.full(len(features), size, np.int32), np.zeros(size, np.float32))
        values = (*_make_ragged(features, lengths, of_samples), *shape_only)
        inputs = {name: torch.from_numpy(value) for name, value in zip(SHAPED_INPUTS, values, strict=True)}
        return cast("Array", build(*features.shape)(inputs, 0)[OUTPUTS[0]].numpy())

    return run
