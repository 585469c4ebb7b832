"""Tiny repositories, made here: one server holds all of the well-formed models."""

import collections
import concurrent.futures
import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from carnelian_serving.launcher import Server
from onnx import TensorProto, helper
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype


def write_model(repository: Path, name: str, config: str, files: Mapping[str, str | bytes]) -> Path:
    """Writes a model folder with version 1."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    for file, content in files.items():
        (version / file).parent.mkdir(exist_ok=True)
        (version / file).write_bytes(content.encode() if isinstance(content, str) else content)
    return repository / name


def ragged_onnx() -> bytes:
    """Sums each row of a flat FEATURES; tells positions up to the longest row, and the batch's elements."""
    nodes = [
        helper.make_node("ReduceProd", ["FEATURES_SHAPE"], ["counts"], axes=[1], keepdims=0),
        helper.make_node("CumSum", ["counts", "axis"], ["ends"]),
        helper.make_node("Sub", ["ends", "counts"], ["starts"]),
        helper.make_node("CumSum", ["FEATURES", "axis"], ["sums"]),
        helper.make_node("Concat", ["zero", "sums"], ["padded"], axis=0),
        helper.make_node("Gather", ["padded", "ends"], ["upto_end"]),
        helper.make_node("Gather", ["padded", "starts"], ["upto_start"]),
        helper.make_node("Sub", ["upto_end", "upto_start"], ["row_sums"]),
        helper.make_node("Unsqueeze", ["row_sums", "last"], ["SUM"]),
        helper.make_node("Gather", ["FEATURES_SHAPE", "one"], ["frames"], axis=1),
        helper.make_node("ReduceMax", ["frames"], ["longest"], keepdims=0),
        helper.make_node("Range", ["nought", "longest", "unit"], ["range"]),
        helper.make_node("Unsqueeze", ["range", "first"], ["one_range"]),
        helper.make_node("Unsqueeze", ["frames", "last"], ["frames_column"]),
        helper.make_node("Mul", ["frames_column", "nought"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one_range"], ["POSITION"]),
        helper.make_node("Shape", ["FEATURES"], ["total"]),
        helper.make_node("Cast", ["total"], ["total32"], to=TensorProto.INT32),
        helper.make_node("Add", ["zeros", "total32"], ["BATCH_ELEMENTS"]),
    ]
    constants = {
        "axis": np.array(0, np.int32),
        "zero": np.zeros(1, np.float32),
        "one": np.array(1, np.int64),
        "first": np.array([0], np.int64),
        "last": np.array([1], np.int64),
        "nought": np.array(0, np.int32),
        "unit": np.array(1, np.int32),
    }
    return onnx_model(
        nodes,
        {"FEATURES": (TensorProto.FLOAT, [None]), "FEATURES_SHAPE": (TensorProto.INT32, [None, 2])},
        {
            "SUM": (TensorProto.FLOAT, [None, 1]),
            "POSITION": (TensorProto.INT32, [None, None]),
            "BATCH_ELEMENTS": (TensorProto.INT32, [None, 1]),
        },
        constants,
    )


def square_onnx() -> bytes:
    """As many numbers for each row as there are rows in the batch."""
    return onnx_model(
        [
            helper.make_node("Shape", ["FEATURES_SHAPE"], ["rows"], start=0, end=1),
            helper.make_node("Concat", ["rows", "rows"], ["square"], axis=0),
            helper.make_node("ReduceSum", ["FEATURES"], ["sum"], keepdims=0),
            helper.make_node("Expand", ["sum", "square"], ["SUMS"]),
        ],
        {"FEATURES": (TensorProto.FLOAT, [None]), "FEATURES_SHAPE": (TensorProto.INT32, [None, 2])},
        {"SUMS": (TensorProto.FLOAT, [None, None])},
        {},
    )


def lookup_onnx() -> bytes:
    """Looks INDEX up in 0, 10, ... 90; an index out of range fails the whole batch in ONNX Runtime."""
    return onnx_model(
        [helper.make_node("Gather", ["table", "INDEX"], ["VALUE"])],
        {"INDEX": (TensorProto.INT32, [None, 1])},
        {"VALUE": (TensorProto.FLOAT, [None, 1])},
        {"table": np.arange(0, 100, 10, dtype=np.float32)},
    )


def large_onnx() -> bytes:
    """SUMS = [rows, 1024] inputs through products with 16 matrices: 64 MiB of weights."""
    weights = {f"weights{i}": np.eye(1024, dtype=np.float32) for i in range(16)}
    tensors = ["VALUES", *(f"product{i}" for i in range(15)), "PRODUCT"]
    return onnx_model(
        [helper.make_node("MatMul", [tensors[i], f"weights{i}"], [tensors[i + 1]]) for i in range(16)],
        {"VALUES": (TensorProto.FLOAT, [None, 1024])},
        {"PRODUCT": (TensorProto.FLOAT, [None, 1024])},
        weights,
    )


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[int | None]]],
    outputs: Mapping[str, tuple[int, list[int | None]]],
    constants: Mapping[str, np.ndarray],
) -> bytes:
    """Serialises a graph."""
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, *what) for name, what in inputs.items()],
        [helper.make_tensor_value_info(name, *what) for name, what in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


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
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("tiny")
    write_model(repository, "ragged", RAGGED_CONFIG, {"model.onnx": ragged_onnx()})
    write_model(repository, "square", SQUARE_CONFIG, {"model.onnx": square_onnx()})
    write_model(repository, "lookup", LOOKUP_CONFIG, {"model.onnx": lookup_onnx()})
    write_model(repository, "large", LARGE_CONFIG, {"model.onnx": large_onnx()})
    write_model(repository, "cut", CUT_CONFIG, {"dali.py": CUT_PIPELINE})
    write_model(repository, "padded", PADDED_CONFIG, {"dali.py": PADDED_PIPELINE})
    write_model(repository, "padded_by_five_threads", FIVE_THREADS_CONFIG, {"dali.py": PADDED_PIPELINE})
    write_model(repository, "bounded", BOUNDED_CONFIG, {"dali.py": CUT_PIPELINE})
    write_model(repository, "heard", HEARD_CONFIG, {"dali.py": HEARD_PIPELINE})
    write_model(repository, "scalar", CUT_CONFIG, {"dali.py": SCALAR_PIPELINE})
    with Server(repository, http_port=0, grpc_port=0, metrics_port=0) as running:
        yield running


class Client:
    """What the tests ask a server."""

    def __init__(self, grpc_url: str) -> None:
        self._client = triton.InferenceServerClient(grpc_url)
        self._sent: collections.Counter[str] = collections.Counter()

    def infer(self, model: str, outputs: Sequence[str] = (), **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Sends one request; returns every output, or those asked for."""
        self._sent[model] += 1
        tensors = self._tensors(inputs)
        wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
        answer = self._client.infer(model, tensors, outputs=wanted, client_timeout=60)
        return {tensor.name: answer.as_numpy(tensor.name) for tensor in answer.get_response().outputs}

    def infer_together(
        self, model: str, requests: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray] | BaseException]:
        """Sends requests at once, for the batcher to join; returns answers or errors, in order."""
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            futures = [pool.submit(self.infer, model, **request) for request in requests]
        return [future.exception() or future.result() for future in futures]

    def infer_at_once(self, model: str, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Any]:
        """Sends requests without waiting for answers; returns answers or errors as they come."""
        answers: queue.Queue[Any] = queue.Queue()

        def receive(result: Any, error: BaseException | None) -> None:
            answers.put(error or result)

        for request in requests:
            self._client.async_infer(model, self._tensors(request), receive)
        return [answers.get(timeout=60) for _ in requests]

    @staticmethod
    def _tensors(inputs: Mapping[str, np.ndarray]) -> list[triton.InferInput]:
        tensors = []
        for name, array in inputs.items():
            tensors.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        return tensors

    def executions(self, model: str) -> int:
        """Returns how many batches the model has run, counting all that this client has sent."""
        deadline = time.monotonic() + 30  # Triton counts a request after it has answered it
        while True:
            statistics = self._client.get_inference_statistics(model).model_stats[0]
            counted = statistics.inference_stats.success.count + statistics.inference_stats.fail.count
            if counted >= self._sent[model] or time.monotonic() > deadline:
                return int(statistics.execution_count)
            time.sleep(0.02)

    def ready_models(self) -> set[str]:
        """Returns the names of the models that are ready."""
        index = self._client.get_model_repository_index().models
        return {model.name for model in index if model.state == "READY"}

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session")
def connect() -> Iterator[Callable[[str], Client]]:
    """Opens clients, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_client(grpc_url: str) -> Client:
            opened = Client(grpc_url)
            stack.callback(opened.close)
            return opened

        yield open_client


@pytest.fixture(scope="session")
def client(tiny_server: Server, connect: Callable[[str], Client]) -> Client:
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
