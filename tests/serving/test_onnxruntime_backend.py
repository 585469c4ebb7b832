import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from carnelian_serving import THREADS_VARIABLE
from carnelian_serving.backends.model_config import ConfigError, ModelConfig, read_model_config
from carnelian_serving.backends.onnxruntime.batch_input import read_batch_inputs
from carnelian_serving.backends.onnxruntime.providers import (
    CUDA_PARAMETERS,
    gpu_providers,
    open_session,
    prepares_each_shape,
)
from carnelian_serving.backends.onnxruntime.session_options import SESSION_PARAMETERS, read_session_options
from carnelian_serving.backends.threads import count_cores, read_quotas, thread_count
from carnelian_serving.installation import Installation
from carnelian_serving.launcher import Server

BASE = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": ["4", "-1"], "allow_ragged_batch": True}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
    "batch_input": [],
    "parameters": {},
}


def read(**changes: object) -> ModelConfig:
    text = json.dumps({**BASE, **changes})
    known = ("num_threads", *SESSION_PARAMETERS, *CUDA_PARAMETERS)
    return read_model_config(text, Path(), known_parameters=known, default_filename="model.onnx")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ITEM_SHAPE", [[4, 9], [4, 9], [4, 5]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [4, 9, 4, 9, 4, 5]),
        ("BATCH_ELEMENT_COUNT", [72, 20]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [72, 92]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 72, 92]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 72),
    ],
)
def test_a_batch_input_is_made_of_the_requests_shapes_as_its_kind_says(kind, expected):
    message = {"kind": kind, "data_type": "TYPE_INT32", "target_name": ["SHAPE", "AGAIN"], "source_input": ["X"]}
    tensors = read_batch_inputs(read(batch_input=[message]))
    assert [tensor.target for tensor in tensors] == ["SHAPE", "AGAIN"]
    for tensor in tensors:
        made = tensor([(2, 4, 9), (1, 4, 5)])
        assert made.dtype == np.int32
        assert made.tolist() == expected


def test_a_batch_input_may_be_of_floats():
    message = {"kind": "BATCH_ITEM_SHAPE", "data_type": "TYPE_FP32", "target_name": ["SHAPE"], "source_input": ["X"]}
    (tensor,) = read_batch_inputs(read(batch_input=[message]))
    assert tensor([(1, 4, 9)]).dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parameters": {"nun_threads": {"string_value": "1"}}},
            "must be among arena_extend_strategy, .*, but there is nun_threads",
        ),
        ({"max_batch_size": 0}, "at least 1"),
        ({"input": []}, "must name its inputs and outputs"),
        ({"output": []}, "must name its inputs and outputs"),
        ({"sequence_batching": {"oldest": {}}}, "not supported here"),
        ({"batch_output": [{"target_name": ["Y"]}]}, "`batch_output` of 'm' is not supported here"),
        ({"input": [{**BASE["input"][0], "data_type": "TYPE_STRING"}]}, "TYPE_STRING"),
        ({"input": [{**BASE["input"][0], "optional": True}]}, "`optional` of 'X'"),
        ({"input": [{**BASE["input"][0], "is_shape_tensor": True}]}, "`is_shape_tensor` of 'X'"),
        ({"output": [{**BASE["output"][0], "reshape": {"shape": [1]}}]}, "`reshape` of 'Y'"),
        ({"model_transaction_policy": {"decoupled": True}}, "must not be decoupled"),
        (
            {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}}},
            "`cpu_execution_accelerator` of 'm'",
        ),
    ],
)
def test_what_the_backends_cannot_do_is_refused_by_name(changes, words):
    with pytest.raises(ConfigError, match=words):
        read(**changes)


def test_a_row_has_the_dimensions_of_the_configuration():
    (tensor,) = read().inputs
    shapes = {(4, 9): True, (4, 0): True, (5, 9): False, (3, 9): False, (4,): False, (4, 9, 1): False}
    assert {shape: tensor.accepts(shape) for shape in shapes} == shapes


def test_a_file_of_another_name_is_the_configurations_to_say():
    assert read().model_filename == "model.onnx"
    assert read(default_model_filename="other.onnx").model_filename == "other.onnx"


OLD = '<ir_version: 8, opset_import: ["" : 17]>'
"""The newest is not every runtime's."""
PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


def accelerated(name: str, **parameters: str) -> ModelConfig:
    accelerators = {"gpu_execution_accelerator": [{"name": name, "parameters": parameters}]}
    return read(optimization={"execution_accelerators": accelerators})


def test_shapes_are_prepared_again_since_onnxruntime_1_20():
    versions = {"1.19.2": False, "1.20.0": True, "1.20rc1": True, "1.31.1+cu13": True, "2.0.0": True, "own": False}
    assert {version: prepares_each_shape(version) for version in versions} == versions


def test_a_gpu_instance_runs_on_cuda_with_the_options_of_its_accelerator():
    assert gpu_providers(read(), "1", PROVIDERS) == [("CUDAExecutionProvider", {"device_id": "1"})]
    config = accelerated("cuda", cudnn_conv_algo_search="HEURISTIC")
    options = {"device_id": "0", "cudnn_conv_algo_search": "HEURISTIC"}
    assert gpu_providers(config, "0", PROVIDERS) == [("CUDAExecutionProvider", options)]
    assert gpu_providers(config, "0", PROVIDERS[2:]) == []


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider' is not in available")
@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="CUDA is there")
def test_a_gpu_instance_does_not_run_on_the_cpu_because_cuda_cannot_be_loaded(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f"{OLD} negation (float[1] A) => (float[1] B) {{ B = Neg(A) }}"), path)
    on_cpu, on_gpu = ("CPUExecutionProvider", {}), ("CUDAExecutionProvider", {"device_id": "0"})
    assert open_session(path, onnxruntime.SessionOptions(), [on_cpu]).get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(ConfigError, match="must run on ONNX Runtime's CUDAExecutionProvider, but that cannot be"):
        open_session(path, onnxruntime.SessionOptions(), [on_gpu, on_cpu])


SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        *(("cudnn_conv_algo_search", str(number), word) for number, word in enumerate(SEARCHES)),
        ("arena_extend_strategy", "1", "kSameAsRequested"),
        ("gpu_mem_limit", "1073741824", "1073741824"),
        ("do_copy_in_default_stream", "0", "0"),
    ],
)
def test_some_options_of_cuda_are_parameters_too(key, value, word):
    config = read(parameters={key: {"string_value": value}})
    assert gpu_providers(config, "0", PROVIDERS) == [("CUDAExecutionProvider", {"device_id": "0", key: word})]


def test_an_unknown_value_of_such_a_parameter_is_refused():
    with pytest.raises(ConfigError, match="must be from 0 to 2, but is 3"):
        gpu_providers(read(parameters={"cudnn_conv_algo_search": {"string_value": "3"}}), "0", PROVIDERS)


def test_options_of_cuda_that_the_native_backend_would_overwrite_are_refused():
    accelerator = {"name": "cuda", "parameters": {"gpu_mem_limit": "1073741824", "tunable_op_enable": "1"}}
    accelerators = {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}}
    config = read(optimization=accelerators, parameters={"enable_mem_pattern": {"string_value": "0"}})
    with pytest.raises(ConfigError, match=r"^gpu_mem_limit of .* must be among its `parameters`"):
        gpu_providers(config, "0", PROVIDERS)


def test_tensorrt_comes_before_cuda_with_its_parameters_as_onnxruntime_names_them():
    config = accelerated("tensorrt", precision_mode="FP16", max_workspace_size_bytes="9", trt_engine_cache_enable="1")
    (first, options), (second, _) = gpu_providers(config, "0", PROVIDERS)
    assert (first, second) == PROVIDERS[:2]
    assert options == {
        "device_id": "0",
        "trt_fp16_enable": "True",
        "trt_max_workspace_size": "9",
        "trt_engine_cache_enable": "True",
    }


def test_tensorrt_takes_the_precisions_and_the_calibration_that_the_native_backend_takes():
    config = accelerated(
        "tensorrt", precision_mode="INT8", int8_calibration_table_name="t", int8_use_native_calibration_table="1"
    )
    (_, options), _ = gpu_providers(config, "0", PROVIDERS)
    assert options == {
        "device_id": "0",
        "trt_int8_enable": "True",
        "trt_int8_calibration_table_name": "t",
        "trt_int8_use_native_calibration_table": "True",
    }


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("openvino", "trt_x"),
        ("tensorrt", "trt_fp16_enable"),  # `precision_mode` there
        ("tensorrt", "trt_engine_cach_enable"),
        ("tensorrt", "precision_mode"),
    ],
)
def test_an_unknown_accelerator_or_parameter_is_refused_by_name(name, key):
    with pytest.raises(ConfigError, match=name if name == "openvino" else key):
        gpu_providers(accelerated(name, **{key: "1"}), "0", PROVIDERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "BATCH_UNHEARD_OF"}, "must be one of BATCH_ELEMENT_COUNT.*, but is BATCH_UNHEARD_OF"),
        ({"data_type": "TYPE_INT64"}, "must be TYPE_INT32 or TYPE_FP32, but is TYPE_INT64"),
        ({"source_input": ["Y"]}, "must name an input, but names 'Y'"),
    ],
)
def test_a_batch_input_that_cannot_be_made_is_refused(changes, words):
    message = {"kind": "BATCH_ITEM_SHAPE", "data_type": "TYPE_INT32", "target_name": ["S"], "source_input": ["X"]}
    with pytest.raises(ConfigError, match=words):
        read_batch_inputs(read(batch_input=[message | changes]))


OPTIONS = {
    "intra_op_num_threads": count_cores(),
    "inter_op_num_threads": 0,
    "execution_mode": onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""Those of a session whose configuration says nothing of them."""


def session_options(**changes: object) -> dict[str, object]:
    options = read_session_options(read(**changes))
    return {name: getattr(options, name) for name in OPTIONS}


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("intra_op_thread_count", "0", {}),
        ("intra_op_thread_count", "3", {"intra_op_num_threads": 3}),
        ("inter_op_thread_count", "2", {"inter_op_num_threads": 2}),
        ("execution_mode", "0", {}),
        ("execution_mode", "1", {"execution_mode": onnxruntime.ExecutionMode.ORT_PARALLEL}),
        ("enable_mem_arena", "0", {"enable_cpu_mem_arena": False}),
        ("enable_mem_pattern", "0", {"enable_mem_pattern": False}),
    ],
)
def test_each_parameter_of_a_session_sets_its_option_alone(monkeypatch, key, value, changed):
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert session_options(parameters={key: {"string_value": value}}) == OPTIONS | changed


@pytest.mark.parametrize(
    ("level", "name"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_a_graph_is_optimised_as_far_as_its_level_says(level, name):
    options = session_options(optimization={"graph": {"level": level}})
    assert options["graph_optimization_level"].name == name


def test_an_execution_mode_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="'execution_mode' of 'm' must be 0 or 1, but is 2"):
        session_options(parameters={"execution_mode": {"string_value": "2"}})


def test_threads_of_the_command_line_override_the_configuration(monkeypatch):
    config = read(parameters={"num_threads": {"string_value": "3"}})
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert thread_count(config, "num_threads") == 3
    assert thread_count(config, "intra_op_thread_count") == 0
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    assert thread_count(config, "num_threads") == 2


def test_the_threads_of_a_native_server_are_those_of_its_onnxruntime(cut_repository):
    native = Installation(Path("tritonserver"), None, {})
    plain, with_threads = (
        [option for option in Server(cut_repository, threads=count)._command(native, Path("r")) if "onnx" in option]
        for count in (None, 3)
    )
    assert plain == []
    assert with_threads == [
        "--backend-config=onnxruntime,enable-global-threadpool=1",
        "--backend-config=onnxruntime,intra_op_thread_count=3",
    ]


def test_parameters_are_typed():
    config = read(parameters={"num_threads": {"string_value": "two"}})
    with pytest.raises(ConfigError, match="must be an integer, but is 'two'"):
        config.integer("num_threads")
    with pytest.raises(ConfigError, match="must be true or false, but is 'two'"):
        config.boolean("num_threads")


def test_booleans_are_spelled_as_triton_lets_them_be():
    assert read().boolean("enable_mem_pattern")
    spelled = {True: ("true", "True", "on", "ON", "1"), False: ("false", "FALSE", "off", "Off", "0")}
    for value, words in spelled.items():
        for word in words:
            config = read(parameters={"enable_mem_pattern": {"string_value": word}})
            assert config.boolean("enable_mem_pattern") is value


def test_threads_sleep_once_a_run_is_over():
    graph = "square (float[256, 256] X) => (float[256, 256] Y) { Y = MatMul(X, X) }"
    model = onnx.parser.parse_model(f"{OLD} {graph}")
    options = read_session_options(read(parameters={"intra_op_thread_count": {"string_value": "2"}}))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    busy_s = []
    for _ in range(10):
        session.run(None, {"X": np.ones((256, 256), np.float32)})
        before = time.process_time()
        time.sleep(0.02)
        busy_s.append(time.process_time() - before)
    assert statistics.median(busy_s) < 0.005  # 0.012 and more if they spin, 0.0003 if not


def test_cores_are_those_that_the_process_may_run_on():
    command = [sys.executable, "-c", "from carnelian_serving.backends.threads import count_cores; print(count_cores())"]
    one = subprocess.run(["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command], capture_output=True)
    assert one.stdout == b"1\n"
    assert 1 <= count_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("own_groups", "files", "quotas"),
    [
        ("0::/", {"cpu.max": "250000 100000\n"}, [2.5]),
        ("0::/pod/server", {"pod/cpu.max": "50000 100000\n", "pod/server/cpu.max": "max 100000\n"}, [0.5]),
        ("0::/../outside\n", {"cpu.max": "max 100000\n"}, []),
        ("4:memory:/m\n1:cpu,cpuacct:/docker/1f\n0::/\n", {"cpu": (150000, 50000)}, [3.0]),
        ("1:cpu:/a\n", {"cpu/a": (200000, 100000), "cpu": (-1, 100000)}, [2.0]),
        ("1:cpuset:/a\n", {"cpuset/a": (200000, 100000)}, []),
    ],
)
def test_quotas_of_control_groups_are_read(tmp_path, monkeypatch, own_groups, files, quotas):
    for name, content in files.items():
        path = tmp_path / name
        if isinstance(content, str):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        else:
            path.mkdir(parents=True, exist_ok=True)
            (path / "cpu.cfs_quota_us").write_text(f"{content[0]}\n")
            (path / "cpu.cfs_period_us").write_text(f"{content[1]}\n")
    (tmp_path / "own_groups").write_text(own_groups)
    monkeypatch.setattr("carnelian_serving.cgroups.OWN_GROUPS", tmp_path / "own_groups")
    monkeypatch.setattr("carnelian_serving.cgroups.GROUPS", tmp_path)
    assert read_quotas() == quotas


def test_cores_are_at_most_the_quota_rounded_up(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(10_000, 10_064)))  # which have no topology
    monkeypatch.setattr("carnelian_serving.backends.threads.read_quotas", lambda: [4.0, 2.5])
    assert count_cores() == 3
    monkeypatch.setattr("carnelian_serving.backends.threads.read_quotas", list)
    assert count_cores() == 64
