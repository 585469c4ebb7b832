"""What keeps a server from starting, each told with what to do."""

import base64
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from carnelian_serving.addresses import choose_ports, find_address
from carnelian_serving.errors import ServerError
from carnelian_serving.installation import (
    Installation,
    InstallationError,
    find_installation,
    find_libpython,
    find_native,
    prepare_wheel,
)
from carnelian_serving.launcher import Server
from carnelian_serving.shared_memory import check_room, describe_shortage

COMMAND = str(Path(sys.executable).with_name("carnelian-serve"))
KILL = "import os; os.kill(os.getpid(), 9)"
DOOMED = f"""
class TritonPythonModel:
    def initialize(self, args):
        {KILL}
"""


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "--http-port=0", "--grpc-port=0", "--metrics-port=0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_word_that_is_no_option_of_tritonserver_is_wrong_use(cut_repository: Path) -> None:
    done = run_command(str(cut_repository))
    assert done.returncode == 2
    assert "must begin with" in done.stderr


def test_an_empty_path_is_no_repository() -> None:
    done = run_command("--repository=")
    assert done.returncode == 2
    assert "must be a folder, but is empty" in done.stderr


def test_a_taken_port_is_named_with_its_option(cut_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (f"--repository={cut_repository}", f"--grpc-port={port}")
        result = run_command(*arguments)
    assert result.returncode == 1
    assert f"`--grpc-port` must be a free port, but {port} on 127.0.0.1 cannot be had" in result.stderr
    assert "`--grpc-port 0` takes any" in result.stderr


def test_a_second_start_takes_any_port_again(cut_repository: Path) -> None:
    server = Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(ServerError, match="must be started first"):
        _ = server.grpc_url
    with server:
        port = int(server.grpc_url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), server:
        assert not server.grpc_url.endswith(f":{port}")


def test_ports_must_differ() -> None:
    [port] = choose_ports("127.0.0.1", {"--http-port": 0}).values()
    with pytest.raises(ServerError, match=f"`--grpc-port` is {port} as well"):
        choose_ports("127.0.0.1", {"--http-port": port, "--grpc-port": port})


@pytest.mark.parametrize("host", ["no.such.host.invalid", "::x", "192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(ServerError, match=f"`--host` must be an address of this machine, but {host} is none: [^(]+$"):
        choose_ports(find_address(host), {"--http-port": 0})


@pytest.mark.parametrize(
    ("option", "words"),
    [("--nonsense=1", "unrecognized option '--nonsense=1'"), ("--log-verbose=x", 'Bad option: "--log-verbose".')],
)
def test_a_wrong_option_of_tritonserver_is_named(cut_repository: Path, option: str, words: str) -> None:
    result = run_command(f"--repository={cut_repository}", "--", option)
    assert result.returncode == 1
    assert f"tritonserver ended with status 1 before it was ready:\n  {words}\n" in result.stderr


def test_the_help_of_tritonserver_is_no_failure_to_start(cut_repository: Path) -> None:
    result = run_command(f"--repository={cut_repository}", "--", "--help")
    assert "  --log-verbose" in result.stderr
    assert result.stderr.endswith(":\n  its options were asked for (`--help`)\n")


def test_too_few_open_files_are_named(cut_repository: Path) -> None:
    command = [COMMAND, f"--repository={cut_repository}", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    limited = ["sh", "-c", 'ulimit -n 40; exec "$0" "$@"', *command]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert "\n  it ran out of open files; allow more (`ulimit -n`)\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repository=nowhere",), "nowhere is not there"),
        (("--repository=models/cut/config.pbtxt",), "config.pbtxt is a file"),
        (("--repository=empty",), "must hold at least one model folder"),
        (("--repository=odd",), "name must be of ASCII letters, digits, `_`, `-` and `.`, but 'my model' of"),
        (("--repository=models", "--model=cot"), "'cot' is not there; it has cut"),
    ],
)
def test_a_wrong_repository_is_named(
    cut_repository: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(cut_repository.parent)
    Path("empty").mkdir()
    Path("odd/my model").mkdir(parents=True)
    result = run_command(*arguments)
    assert result.returncode == 1
    assert words in result.stderr


def test_a_repository_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    result = run_command(f"--repository={tmp_path / 'loop'}")
    assert (result.returncode, "loop leads nowhere" in result.stderr) == (1, True)
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && "{COMMAND}"'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, "the working directory must be there" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"import time; time.sleep(0.5)\n{KILL}", r"process of doomed \(SIGKILL\) has crashed; .* memory has run out"),
        (DOOMED, r"Stub process 'doomed_0\S*' is not healthy; it may have crashed, as where memory has run out"),
    ],
)
def test_a_process_that_is_killed_while_its_model_loads_is_named_at_once(
    cut_repository: Path, add_model: Callable[..., Path], program: str, words: str
) -> None:
    add_model(cut_repository, "doomed", CUT_WITHOUT_LENGTH.replace("dali", "python"), {"model.py": program})
    with (
        pytest.raises(ServerError, match=words),
        Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0),
    ):
        pass


@pytest.fixture
def start_script(cut_repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Starts a shell script in place of tritonserver and returns why it did not become ready."""

    def start(script: str) -> str:
        def wrap(scratch: Path) -> Installation:
            binary = scratch / "script"
            binary.write_text(f"#!/bin/sh\n{script}\n")
            binary.chmod(0o755)
            return replace(find_installation(scratch), binary=binary)

        monkeypatch.setattr("carnelian_serving.launcher.find_installation", wrap)
        with (
            pytest.raises(ServerError) as error,
            Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0),
        ):
            pass
        return str(error.value)

    return start


NO_GPU = 'E1126 13:48:34.559668 7384 server.cc:241] "CudaDriverHelper has not been initialized."'


@pytest.mark.parametrize(
    ("signal", "words"),
    [("KILL", "SIGKILL is what the kernel sends where memory has run out"), ("SEGV", "as where memory has run out")],
)
def test_a_server_that_is_killed_while_it_loads_is_told_with_what_kills(
    start_script: Callable[[str], str], signal: str, words: str
) -> None:
    why = start_script(f"echo '{NO_GPU}'; echo the last line; kill -{signal} $$")
    assert why.startswith(f"tritonserver was ended by SIG{signal} before it was ready:\n  ")
    assert why.endswith(f"{words}\n  last lines of its log:\n  the last line")


NO_THREAD = (
    'E1126 13:45:45.266461 7 backend_model.cc:692] "ERROR: Failed to create instance: RuntimeError: Resource '
    'temporarily unavailable\\n\\nAt:\\n  /lib/nvidia/dali/pipeline.py(1808): deserialize"'
)
OUT_OF_THREADS = "it ran out of threads or processes; allow more (`pids.max` of the container, `ulimit -u`)"


@pytest.mark.parametrize(
    "line",
    [
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 64: Resource temporarily unavailable",
        "terminate called after throwing an instance of 'std::system_error'",
        NO_THREAD,
    ],
)
def test_too_few_threads_are_named(start_script: Callable[[str], str], line: str) -> None:
    assert f":\n  {OUT_OF_THREADS}" in start_script(f"cat <<'END'\n{line}\nEND\nexit 1")


def test_a_server_that_hangs_once_a_model_has_failed_is_ended(
    start_script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carnelian_serving.launcher.FAILED_WHILE_LOADING_S", 0.1)
    why = start_script(f"cat <<'END'\n{NO_THREAD}\nEND\nexec sleep 60")
    assert why == f"every model must load, but one cannot, and tritonserver hangs:\n  {OUT_OF_THREADS}"


@pytest.mark.parametrize(
    ("option", "words"), [("--log-format=ISO8601", "model 'typo' could not be"), ("--log-file={}", "its log is in {}")]
)
def test_the_reason_is_found_in_any_log(
    cut_repository: Path, add_model: Callable[..., Path], tmp_path: Path, option: str, words: str
) -> None:
    log = tmp_path / "triton.log"
    add_model(cut_repository, "typo", "max_batch_sise: 4\n" + CUT_WITHOUT_LENGTH, {})
    result = run_command(f"--repository={cut_repository}", "--", option.format(log))
    assert (result.returncode, words.format(log) in result.stderr) == (1, True)


def test_the_command_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'onnxruntime', 'nvidia.dali', 'pytriton'} & set(sys.modules)"
    script = f"import sys, carnelian_serving.cli; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_wrong_use_ends_with_status_2() -> None:
    assert run_command("--log-level=loud").returncode == 2
    assert run_command("--threads=0").returncode == 2


CUT_WITHOUT_LENGTH = """
backend: "dali"
max_batch_size: 4
input { name: "SIGNAL" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "CUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
MISTYPED_CONFIG = (
    CUT_WITHOUT_LENGTH
    + """
input { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "DOUBLE" data_type: TYPE_INT32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 4 }
model_warmup {
  name: "silence"
  batch_size: 1
  inputs { key: "SIGNAL" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
  inputs { key: "LENGTH" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
}
"""
)
COPY_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
BARE_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
"""
STRANGER = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
STRANGER_CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
}
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 1
input { name: "SIGNAL" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "CUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "DOUBLE" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "cut" model_version: -1
    input_map { key: "SIGNAL" value: "SIGNAL" }
    input_map { key: "LENGTH" value: "LENGTH" }
    output_map { key: "CUT" value: "CUT" }
    output_map { key: "DOUBLE" value: "DOUBLE" }
  }
}
"""


def copy_onnx(columns: str | int, element_type: int = onnx.TensorProto.FLOAT) -> bytes:
    """A graph from X to Y = X, [rows, columns]."""
    x, y = (onnx.helper.make_tensor_value_info(name, element_type, ["rows", columns]) for name in "XY")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["X"], ["Y"])], "copy", [x], [y])
    opset = onnx.helper.make_opsetid("", 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def test_each_bad_model_is_named_with_its_reason(cut_repository: Path, add_model: Callable[..., Path]) -> None:
    pipeline = (cut_repository / "cut" / "1" / "dali.py").read_text()
    add_model(cut_repository, "typo", "max_batch_sise: 4\n" + CUT_WITHOUT_LENGTH, {"dali.py": pipeline})
    add_model(cut_repository, "short", CUT_WITHOUT_LENGTH, {"dali.py": pipeline})
    add_model(cut_repository, "broken", CUT_WITHOUT_LENGTH, {"dali.py": "raise KeyError('mel')"})
    add_model(cut_repository, "absent", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    add_model(cut_repository, "vague", COPY_CONFIG, {"model.onnx": copy_onnx("columns")})
    add_model(cut_repository, "narrow", COPY_CONFIG, {"model.onnx": copy_onnx(1)})
    add_model(cut_repository, "whole", COPY_CONFIG.replace("FP32", "INT32", 1), {"model.onnx": copy_onnx(2)})
    add_model(cut_repository, "words", BARE_CONFIG, {"model.onnx": copy_onnx(2, onnx.TensorProto.STRING)})
    add_model(cut_repository, "counts", BARE_CONFIG, {"model.onnx": copy_onnx(2, onnx.TensorProto.UINT32)})
    add_model(cut_repository, "parts", BARE_CONFIG, {"model.onnx/model.onnx": copy_onnx(2)})
    add_model(cut_repository, "exact", COPY_CONFIG, {"model.onnx": copy_onnx(2)})
    tight = CUT_WITHOUT_LENGTH + 'parameters { key: "memory_mib" value { string_value: "-1" } }'
    add_model(cut_repository, "tight", tight, {"dali.py": pipeline})
    add_model(cut_repository, "foreign", CUT_WITHOUT_LENGTH.replace("dali", "tensorrt"), {"model.plan": ""})
    for folder in (".git", "lost+found"):
        (cut_repository / folder / "objects").mkdir(parents=True)
    with (
        pytest.raises(ServerError) as caught,
        Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0),
    ):
        pass
    message = str(caught.value)
    assert message.count("if this folder is no model, move it away, or name those to serve by `--model`") == 2
    assert "model 'typo' could not be loaded" in message
    assert 'has no field named "max_batch_sise"' in message
    assert "model 'short' could not be loaded" in message
    assert "must have the 2 outputs of the pipeline" in message
    assert "model 'broken' could not be loaded" in message
    assert "KeyError: 'mel'" in message
    assert "model 'absent' could not be loaded" in message
    assert "neither" in message
    assert "output 'Y' of 'vague' must have the shape [-1, 2] in the graph, but has [-1, -1]" in message
    assert "input 'X' of 'narrow' must have the shape [-1, 2] in the graph, but has [-1, 1]" in message
    assert "input 'X' of 'whole' must be int32 in the graph, but is tensor(float)" in message
    assert "words/1/model.onnx must be one of tensor(bool)" in message
    assert "model 'counts'" not in message
    assert "model 'parts'" not in message
    assert "model 'exact'" not in message
    assert "parameter 'memory_mib' of 'tight' must be 0, for no bound, or at least 16, but is -1" in message
    assert "model 'foreign' could not be loaded" in message
    assert "tensorrt" in message
    assert "model 'cut'" not in message


@pytest.mark.parametrize("models", [[], ["absent"]], ids=["all", "chosen"])
def test_reasons_name_the_repository_that_was_given(
    cut_repository: Path, add_model: Callable[..., Path], models: list[str]
) -> None:
    repository = cut_repository.rename(cut_repository.with_name("rep ü x"))  # served by a link
    add_model(repository, "absent", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    log: list[str] = []
    with (
        pytest.raises(ServerError, match=f"neither {repository}/absent/1/model.dali"),
        Server(repository, models=models, http_port=0, grpc_port=0, metrics_port=0, on_log=log.append),
    ):
        pass
    assert any(f"{repository}/absent" in line for line in log)


def test_a_failing_warm_up_is_told_also_where_tritonserver_crashes_of_it(
    cut_repository: Path, add_model: Callable[..., Path]
) -> None:
    pipeline = (cut_repository / "cut" / "1" / "dali.py").read_text()
    add_model(cut_repository, "mistyped", MISTYPED_CONFIG, {"dali.py": pipeline})
    words = r"output 'DOUBLE' of 'mistyped' \(number 1\) must be int32 \[-1\], but the model gave float32 \[4\]"
    with (
        pytest.raises(ServerError, match=words),
        Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0),
    ):
        pass


def test_a_model_that_is_asked_for_brings_what_it_is_composed_of(
    cut_repository: Path, add_model: Callable[..., Path], connect: Callable[[str], Any]
) -> None:
    add_model(cut_repository, "both", ENSEMBLE, {"ensemble.txt": ""})
    add_model(cut_repository, "all", ENSEMBLE.replace('model_name: "cut"', "model_name: 'both'"), {"ensemble.txt": ""})
    add_model(cut_repository, "unloadable", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    with (cut_repository / "all" / "config.pbtxt").open("a") as config:
        config.write("""parameters { key: "note" value { string_value: "model_name: 'unloadable' #" } }
        # model_name: "unloadable\"""")
    with Server(cut_repository, models=["all"], http_port=0, grpc_port=0, metrics_port=0) as server:
        client = connect(server.grpc_url)
        assert client.ready_models() == {"all", "both", "cut"}
        answer = client.infer("all", SIGNAL=np.ones((1, 4), np.float32), LENGTH=np.full((1, 1), 2, np.int32))
        assert answer["CUT"].shape == (1, 2)


def test_nobody_loads_models_beside_those_that_were_asked_for(cut_repository: Path) -> None:
    with Server(cut_repository, models=["cut"], http_port=0, grpc_port=0, metrics_port=0) as server:

        def post(path: str, body: object) -> bytes:
            request = urllib.request.Request(
                f"http://{server.http_url}/v2/repository/{path}",
                json.dumps(body).encode(),
                {"Content-Type": "text/plain"},
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read()

        code = base64.b64encode(STRANGER.encode()).decode()
        parameters = {"config": json.dumps(STRANGER_CONFIG), "file:1/model.py": code}
        for path in ("models/stranger/load", "models/cut/load", "models/cut/unload"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(path, {"parameters": parameters if "stranger" in path else {}})
            with refused.value as answer:
                assert b"not allowed" in answer.read()
        assert json.loads(post("index", {})) == [{"name": "cut", "version": "1", "state": "READY"}]


def test_little_shared_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(ServerError, match=r"but 8\.0 MiB are free; in a container, start it with --shm-size"):
        check_room(8 * 2**20)


def test_shared_memory_that_long_clips_would_fill_is_said(
    cut_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr("carnelian_serving.launcher.find_free_bytes", lambda: 48 * 2**20)  # one instance needs 50
    with Server(cut_repository, http_port=0, grpc_port=0, metrics_port=0, on_log=log.append):
        pass
    assert any("/dev/shm should have 50 MiB for 1 Python-based instances" in line for line in log)
    assert describe_shortage(350 * 2**20, 7) == ""


def test_a_scratch_where_nothing_may_run_is_refused(mount_tmpfs: Callable[..., Path]) -> None:
    with pytest.raises(InstallationError, match="may not run there"):
        prepare_wheel(mount_tmpfs("noexec"))


def test_a_scratch_without_room_is_named_with_its_variable(mount_tmpfs: Callable[..., Path]) -> None:
    scratch = mount_tmpfs("size=1m") / "scratch"
    scratch.mkdir()
    with pytest.raises(InstallationError, match=rf"in {scratch.parent}, but there is too little \(No space .*TMPDIR"):
        prepare_wheel(scratch)


def test_an_environment_whose_path_stubs_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", "/home/josé/.venv")
    with pytest.raises(InstallationError, match="paths as ASCII"):
        prepare_wheel(tmp_path)


def test_a_missing_libpython_is_told_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(InstallationError, match=r"apt-get install libpython3\.99"):
        find_libpython("3.99", [tmp_path])
    library = tmp_path / "libpython3.99.so.1.0"
    library.touch()
    assert find_libpython("3.99", [tmp_path]) == library


def test_a_native_installation_needs_every_backend(tmp_path: Path) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch()
    for name in ("dali", "onnxruntime", "python"):
        assert find_native(str(binary), tmp_path / "elsewhere") is None
        (tmp_path / "backends" / name).mkdir(parents=True)
        (tmp_path / "backends" / name / f"libtriton_{name}.so").touch()
    assert find_native(str(binary), tmp_path / "elsewhere") == binary
    assert find_native(None, tmp_path) == binary
