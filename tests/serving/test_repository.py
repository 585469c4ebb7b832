"""What a repository holds, and which of it is served: each bad model is named, and chosen ones bring their stages."""

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest
from carnelian_serving.errors import ServerError
from carnelian_serving.repository import check_repository

POLL = ["--model-control-mode=poll", "--repository-poll-secs=1"]
KILL = "import os; os.kill(os.getpid(), 9)"
DOOMED = f"""
class TritonPythonModel:
    def initialize(self, args):
        {KILL}
"""
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
BATCH_INPUT = """
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "LENGTH" data_type: TYPE_INT32 source_input: "SIGNAL" }
"""
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


def copy_onnx(columns: str | int, kind: str = "float") -> bytes:
    """A graph from X to Y = X, [rows, columns]."""
    tensor = f"{kind}[rows, {columns}]"
    graph = f"copy ({tensor} X) => ({tensor} Y) {{ Y = Identity(X) }}"
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}').SerializeToString()


def test_each_bad_model_is_named_with_its_reason(cut_repository, add_model, make_server):
    pipeline = (cut_repository / "cut" / "1" / "dali.py").read_text()
    add_model(cut_repository, "typo", "max_batch_sise: 4\n" + CUT_WITHOUT_LENGTH, {"dali.py": pipeline})
    add_model(cut_repository, "short", CUT_WITHOUT_LENGTH, {"dali.py": pipeline})
    add_model(cut_repository, "broken", CUT_WITHOUT_LENGTH, {"dali.py": "raise KeyError('mel')"})
    add_model(cut_repository, "absent", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    add_model(cut_repository, "vague", COPY_CONFIG, {"model.onnx": copy_onnx("columns")})
    add_model(cut_repository, "narrow", COPY_CONFIG, {"model.onnx": copy_onnx(1)})
    add_model(cut_repository, "whole", COPY_CONFIG.replace("FP32", "INT32", 1), {"model.onnx": copy_onnx(2)})
    add_model(cut_repository, "words", BARE_CONFIG, {"model.onnx": copy_onnx(2, "string")})
    add_model(cut_repository, "counts", BARE_CONFIG, {"model.onnx": copy_onnx(2, "uint32")})
    add_model(cut_repository, "parts", BARE_CONFIG, {"model.onnx/model.onnx": copy_onnx(2)})
    add_model(cut_repository, "exact", COPY_CONFIG, {"model.onnx": copy_onnx(2)})
    tight = CUT_WITHOUT_LENGTH + 'parameters { key: "memory_mib" value { string_value: "-1" } }'
    add_model(cut_repository, "tight", tight, {"dali.py": pipeline})
    add_model(cut_repository, "unfed", COPY_CONFIG.replace('"X"', '"Z"'), {"model.onnx": copy_onnx(2)})
    add_model(cut_repository, "unmade", COPY_CONFIG.replace('"Y"', '"Z"'), {"model.onnx": copy_onnx(2)})
    add_model(cut_repository, "described", CUT_WITHOUT_LENGTH + BATCH_INPUT, {"dali.py": pipeline})
    add_model(cut_repository, "foreign", CUT_WITHOUT_LENGTH.replace("dali", "tensorrt"), {"model.plan": ""})
    for folder in (".git", "lost+found"):
        (cut_repository / folder / "objects").mkdir(parents=True)
    with pytest.raises(ServerError) as caught:
        make_server(cut_repository).start()
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
    assert "under another name, where carnelian-export refuses to replace this one), or change `dims`" in message
    assert "input 'X' of 'whole' must be int32 in the graph, but is tensor(float)" in message
    assert "words/1/model.onnx must be one of tensor(bool)" in message
    assert "model 'counts'" not in message
    assert "model 'parts'" not in message
    assert "model 'exact'" not in message
    assert "inputs and batch inputs of 'unfed' must be those of the graph, ['X'], but are ['Z']" in message
    assert "outputs of 'unmade' must be among ['Y'], but there is ['Z']" in message
    assert "`batch_input` of 'described' has no meaning for DALI; take it out" in message
    assert "parameter 'memory_mib' of 'tight' must be 0, for no bound, or at least 16, but is -1" in message
    assert "model 'foreign' could not be loaded" in message
    assert "tensorrt" in message
    assert "model 'cut'" not in message


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"import time; time.sleep(0.5)\n{KILL}", r"process of doomed \(SIGKILL\) has crashed; .* memory has run out"),
        (
            DOOMED,
            r"Stub process 'doomed_0\S*' is not healthy; it may have crashed, as where memory has run out, or the "
            "machine paused a second",
        ),
    ],
)
def test_a_process_that_is_killed_while_its_model_loads_is_named_at_once(
    cut_repository, add_model, program, words, make_server
):
    add_model(cut_repository, "doomed", CUT_WITHOUT_LENGTH.replace("dali", "python"), {"model.py": program})
    with pytest.raises(ServerError, match=words):
        make_server(cut_repository).start()


@pytest.mark.parametrize("models", [[], ["absent"]], ids=["all", "chosen"])
def test_reasons_name_the_repository_that_was_given(cut_repository, add_model, models, make_server):
    repository = cut_repository.rename(cut_repository.with_name("rep ü x"))  # served by a link
    add_model(repository, "absent", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    log = []
    with pytest.raises(ServerError, match=f"neither {repository}/absent/1/model.dali"):
        make_server(repository, models=models, on_log=log.append).start()
    assert any(f"{repository}/absent" in line for line in log)


@pytest.mark.parametrize(("name", "models"), [("speech-models", []), ("plain", ["cut"])], ids=["all", "chosen"])
def test_the_path_that_triton_gets_has_only_what_its_own_backends_take(cut_repository, name, models, make_server):
    repository = cut_repository.rename(cut_repository.with_name(name))
    with make_server(repository, models=models) as server:
        command = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    (path,) = (word.partition("=")[2] for word in command if word.startswith("--model-repository="))
    assert re.fullmatch("[A-Za-z0-9_./]+", path)


def test_a_failing_warm_up_is_told_also_where_tritonserver_crashes_of_it(cut_repository, add_model, make_server):
    pipeline = (cut_repository / "cut" / "1" / "dali.py").read_text()
    add_model(cut_repository, "mistyped", MISTYPED_CONFIG, {"dali.py": pipeline})
    words = r"output 'DOUBLE' of 'mistyped' \(number 1\) must be int32 \[-1\], but the model gave float32 \[4\]"
    log = []
    with pytest.raises(ServerError, match=words):
        make_server(cut_repository, on_log=log.append).start()
    # Written by the model's process itself: what goes through Triton's logger may be lost in the crash.
    assert any(re.fullmatch(f"error: .*'mistyped' refuses: {words}", line) for line in log)


def test_a_model_that_is_asked_for_brings_what_it_is_composed_of(cut_repository, add_model, connect, make_server):
    add_model(cut_repository, "both", ENSEMBLE, {"ensemble.txt": ""})
    add_model(cut_repository, "all", ENSEMBLE.replace('model_name: "cut"', "model_name: 'both'"), {"ensemble.txt": ""})
    add_model(cut_repository, "unloadable", CUT_WITHOUT_LENGTH, {"readme.txt": ""})
    with (cut_repository / "all" / "config.pbtxt").open("a") as config:
        config.write("""parameters { key: "note" value { string_value: "model_name: 'unloadable' #" } }
        # model_name: "unloadable\"""")
    with make_server(cut_repository, models=["all"]) as server:
        client = connect(server.grpc_url)
        index = client.client.get_model_repository_index().models
        assert {model.name for model in index if model.state == "READY"} == {"all", "both", "cut"}
        answer = client.infer("all", SIGNAL=np.ones((1, 4), np.float32), LENGTH=np.full((1, 1), 2, np.int32))
        assert answer["CUT"].shape == (1, 2)


def test_nobody_loads_models_beside_those_that_were_asked_for(cut_repository, make_server):
    with make_server(cut_repository, models=["cut"]) as server:

        def post(path, body):
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


@pytest.mark.parametrize("closed", ["my models", "my models/all", "store"])
def test_a_repository_that_its_user_may_not_read_is_named_with_what_opens_it(everyones, another_user, closed):
    repository = everyones / "my models" / "all"
    (everyones / "store" / "linked").mkdir(parents=True)
    repository.mkdir(parents=True)
    (repository / "linked").symlink_to(everyones / "store" / "linked")
    (everyones / closed).chmod(0)
    with another_user(), pytest.raises(ServerError, match=rf"uid \d+ may read, but {everyones / closed} is") as error:
        check_repository(repository, [])
    (advice,) = re.findall("`(chmod .*)`", str(error.value))
    subprocess.run(["sh", "-c", advice], check=True)
    with another_user():
        check_repository(repository, [])


@pytest.mark.parametrize("models", [[], ["cut"]], ids=["all", "chosen"])
def test_a_link_to_the_repository_may_be_swapped_while_the_server_polls(
    cut_repository, make_server, models, wait_until
):
    """As git-sync does, which then deletes the old folder."""
    old, new, current = (cut_repository.with_name(name) for name in ("old", "new", "current"))
    cut_repository.rename(old)
    shutil.copytree(old, new)
    shutil.copytree(new / "cut" / "1", new / "cut" / "2")
    current.symlink_to("old")
    with make_server(current, models=models, triton_options=POLL) as server:

        def is_ready(version: int) -> bool:
            try:
                urllib.request.urlopen(f"http://{server.http_url}/v2/models/cut/versions/{version}/ready").close()
            except urllib.error.HTTPError as error:
                error.close()
                return False
            return True

        assert is_ready(1)
        current.with_name("next").symlink_to("new")
        current.with_name("next").replace(current)
        shutil.rmtree(old)
        wait_until(lambda: is_ready(2))
