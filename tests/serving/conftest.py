"""Tiny repositories, made here: one server holds all of the well-formed models."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from carnelian_serving.launcher import Server


def write_model(repository: Path, name: str, config: str, files: Mapping[str, str | bytes]) -> Path:
    """Writes a model folder with version 1."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    for file, content in files.items():
        (version / file).parent.mkdir(exist_ok=True)
        (version / file).write_bytes(content.encode() if isinstance(content, str) else content)
    return repository / name


def onnx_model(graph: str, **weights: np.ndarray) -> bytes:
    """Serialises a graph as ONNX writes them, and tensors that it names without a value."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.checker.check_model(model)
    return model.SerializeToString()


RAGGED_ONNX = """
ragged (float[all] FEATURES, int32[rows, 2] FEATURES_SHAPE)
  => (float[rows, 1] SUM, int32[rows, most] POSITION, int32[rows, 1] BATCH_ELEMENTS)
<int32 axis = {0}, float[1] zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] last = {1}, int32 nought = {0},
 int32 unit = {1}>
{
  counts = ReduceProd<axes = [1], keepdims = 0>(FEATURES_SHAPE)
  ends = CumSum(counts, axis)
  starts = Sub(ends, counts)
  sums = CumSum(FEATURES, axis)
  padded = Concat<axis = 0>(zero, sums)
  upto_end = Gather(padded, ends)
  upto_start = Gather(padded, starts)
  row_sums = Sub(upto_end, upto_start)
  SUM = Unsqueeze(row_sums, last)
  frames = Gather<axis = 1>(FEATURES_SHAPE, one)
  longest = ReduceMax<keepdims = 0>(frames)
  range = Range(nought, longest, unit)
  one_range = Unsqueeze(range, first)
  frames_column = Unsqueeze(frames, last)
  zeros = Mul(frames_column, nought)
  POSITION = Add(zeros, one_range)
  total = Shape(FEATURES)
  total32 = Cast<to = 6>(total)
  BATCH_ELEMENTS = Add(zeros, total32)
}
"""
"""Sums each row of a flat FEATURES; tells positions up to the longest row, and the batch's elements."""
SQUARE_ONNX = """
square (float[all] FEATURES, int32[batch, 2] FEATURES_SHAPE) => (float[row, column] SUMS)
{
  rows = Shape<start = 0, end = 1>(FEATURES_SHAPE)
  square = Concat<axis = 0>(rows, rows)
  sum = ReduceSum<keepdims = 0>(FEATURES)
  SUMS = Expand(sum, square)
}
"""
"""As many numbers for each row as there are rows in the batch."""
LOOKUP_ONNX = """
lookup (int32[rows, 1] INDEX) => (float[rows, 1] VALUE)
<float[10] table = {0, 10, 20, 30, 40, 50, 60, 70, 80, 90}, int64[1] last = {1}, int32 nought = {0}>
{
  values = Gather(table, INDEX)
  indices = Squeeze(INDEX, last)
  is_kept = GreaterOrEqual(indices, nought)
  VALUE = Compress<axis = 0>(values, is_kept)
}
"""
"""An index out of range fails the whole batch in ONNX Runtime. A negative one has no row in the answer."""
PRODUCTS = " ".join(f"PRODUCT{i + 1} = MatMul(PRODUCT{i}, weights{i})" for i in range(16))
LARGE_ONNX = f"large (float[rows, 1024] PRODUCT0) => (float[rows, 1024] PRODUCT16) {{ {PRODUCTS} }}"
LARGE_WEIGHTS = {f"weights{i}": np.eye(1024, dtype=np.float32) for i in range(16)}
"""64 MiB."""
RAGGED_INPUTS = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "FEATURES" data_type: TYPE_FP32 dims: [ 4, -1 ] allow_ragged_batch: true }
batch_input {
  kind: BATCH_ITEM_SHAPE target_name: "FEATURES_SHAPE" data_type: TYPE_INT32 source_input: "FEATURES"
}
"""
# A batch runs once it has its preferred size. No test waits for the delay, which is for machines that stand still.
RAGGED_CONFIG = (
    RAGGED_INPUTS
    + """output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "POSITION" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "BATCH_ELEMENTS" data_type: TYPE_INT32 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 30000000 preferred_batch_size: [ 4 ] }
instance_group { kind: KIND_AUTO count: 1 }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
)
SQUARE_CONFIG = (
    RAGGED_INPUTS
    + """output { name: "SUMS" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
)
LOOKUP_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
dynamic_batching { max_queue_delay_microseconds: 30000000 preferred_batch_size: [ 3 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
LARGE_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
instance_group { kind: KIND_CPU count: 1 }
"""
CUT_TENSORS = """
backend: "dali"
input { name: "SIGNAL" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "CUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "DOUBLE" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
CUT_CONFIG = (
    CUT_TENSORS
    + """max_batch_size: 4
dynamic_batching { max_queue_delay_microseconds: 30000000 preferred_batch_size: [ 3 ] }
parameters { key: "num_threads" value { string_value: "1" } }
"""
)
BOUNDED_CONFIG = (
    CUT_TENSORS
    + """max_batch_size: 32
parameters { key: "num_threads" value { string_value: "8" } }
parameters { key: "memory_mib" value { string_value: "64" } }
"""
)
CUT_PIPELINE = """
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.triton import autoserialize


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def cut():
    signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
    length = fn.external_source(name="LENGTH", dtype=types.INT32, ndim=1)
    return fn.slice(signal, start=0, shape=length, axes=[0]), signal * 2
"""


def serialize_cut() -> bytes:
    """The pipeline of `CUT_PIPELINE` as DALI writes it to a file."""
    names: dict[str, Any] = {}
    exec(CUT_PIPELINE, names)
    return names["cut"]().serialize()


HEARD_CONFIG = """
backend: "dali"
max_batch_size: 1
input { name: "AUDIO" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "SIGNAL" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "memory_mib" value { string_value: "64" } }
"""
HEARD_PIPELINE = """
from __future__ import annotations

from dataclasses import dataclass

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.triton import autoserialize


@dataclass
class Settings:  # whose annotations are looked up in `sys.modules`
    downmix: bool = True


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def hear():
    audio = fn.external_source(name="AUDIO", dtype=types.UINT8, ndim=1)
    return fn.decoders.audio(audio, dtype=types.FLOAT, downmix=Settings().downmix)[0]
"""
SCALAR_PIPELINE = CUT_PIPELINE.replace(
    "fn.slice(signal, start=0, shape=length, axes=[0])",
    "fn.reductions.sum(signal) + fn.reductions.sum(length)",
)
PADDED_CONFIG = CUT_CONFIG.replace("max_batch_size: 4", "max_batch_size: 8").replace("[ 3 ]", "[ 6 ]")
PADDED_PIPELINE = CUT_PIPELINE.replace("signal * 2", "fn.pad(signal)")
GROWN_CONFIG = PADDED_CONFIG.replace("[ 6 ]", "[ 8 ]").replace("30000000", "500000")  # where fewer are sent as well
GROWN_PIPELINE = CUT_PIPELINE.replace(
    "fn.slice(signal, start=0, shape=length, axes=[0])", "fn.pad(signal, axes=[0], shape=length)"
)
FIVE_THREADS_CONFIG = PADDED_CONFIG.replace('string_value: "1"', 'string_value: "5"')


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, make_server: Callable[..., Server]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("tiny")
    write_model(repository, "ragged", RAGGED_CONFIG, {"model.onnx": onnx_model(RAGGED_ONNX)})
    write_model(repository, "square", SQUARE_CONFIG, {"model.onnx": onnx_model(SQUARE_ONNX)})
    write_model(repository, "lookup", LOOKUP_CONFIG, {"model.onnx": onnx_model(LOOKUP_ONNX)})
    write_model(repository, "large", LARGE_CONFIG, {"model.onnx": onnx_model(LARGE_ONNX, **LARGE_WEIGHTS)})
    write_model(repository, "cut", CUT_CONFIG, {"dali.py": CUT_PIPELINE})
    write_model(repository, "padded", PADDED_CONFIG, {"dali.py": PADDED_PIPELINE})
    write_model(repository, "padded_by_five_threads", FIVE_THREADS_CONFIG, {"dali.py": PADDED_PIPELINE})
    write_model(repository, "bounded", BOUNDED_CONFIG, {"model.dali": serialize_cut()})
    write_model(repository, "heard", HEARD_CONFIG, {"dali.py": HEARD_PIPELINE})
    write_model(repository, "scalar", CUT_CONFIG, {"dali.py": SCALAR_PIPELINE})
    with make_server(repository) as running:
        yield running


@pytest.fixture(scope="session")
def client(tiny_server: Server, connect: Callable[[str], Any]) -> Any:
    """The models of `tiny_server`."""
    return connect(tiny_server.grpc_url)


@pytest.fixture
def add_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture
def grown_repository(tmp_path: Path) -> Path:
    """A repository of one model, whose answers are as long as a request wants."""
    write_model(tmp_path / "models", "grown", GROWN_CONFIG, {"dali.py": GROWN_PIPELINE})
    return tmp_path / "models"


@pytest.fixture
def cut_repository(tmp_path: Path) -> Path:
    """A repository of one small model, for tests that start a server of their own."""
    write_model(tmp_path / "models", "cut", CUT_CONFIG.replace("[ 3 ]", "[ 1 ]"), {"dali.py": CUT_PIPELINE})
    return tmp_path / "models"


@pytest.fixture
def command_line() -> list[str]:
    """`carnelian-serve` on free ports."""
    command = Path(sys.executable).with_name("carnelian-serve")
    return [str(command), "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
