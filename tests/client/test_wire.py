"""`client/docs/wire.md` against a real server: what it shows runs, and errors are what it says."""

import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
import zlib
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "client" / "docs" / "wire.md").read_text()
CLIP = ROOT / "demo" / "clips" / "letter.wav"
READ_WITH_NGRAM = "she opened the letter slowly and read it twice before"


def blocks(language, server, folder):
    """The page's code, for this server, in a folder with a clip."""
    shutil.copy(CLIP, folder / "clip.wav")
    code = PAGE.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    return re.findall(rf"```{language}\n(.*?)```", code, re.DOTALL)


def split_binary(answer, size):
    """Outputs behind the JSON of an answer, by name."""
    found = {}
    for output in json.loads(answer[:size])["outputs"]:
        end = size + output["parameters"]["binary_data_size"]
        found[output["name"]] = answer[size + 4 : end].decode()
        size = end
    return found


@pytest.fixture(scope="module")
def post(server):
    """Sends a document, and bytes behind it, over HTTP."""
    connection = http.client.HTTPConnection(server.http_url, timeout=30)

    def send(model, document, data=b"", path="infer", pack=bytes, **more_headers):
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))} if data else {}
        connection.request("POST", f"/v2/models/{model}/{path}", pack(text + data), headers | more_headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    yield send
    connection.close()


def request_of(data, parameters=None, **changes):
    tensor = {"name": "AUDIO", "datatype": "UINT8", "shape": [1, len(data)]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    return {"inputs": [{**tensor, **changes}], "parameters": parameters or {}}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_shown_command_gets_a_transcript_with_its_options(server, tmp_path):
    with_options, _ = blocks("sh", server, tmp_path)
    done = subprocess.run(["sh", "-c", with_options], cwd=tmp_path, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["id"] == "7"
    assert [output["name"] for output in answer["outputs"]] == ["TRANSCRIPT"]
    assert answer["outputs"][0]["data"][0].startswith(READ_WITH_NGRAM)


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
def test_the_commands_count_bytes_not_characters(server, tmp_path):
    with_options, _ = blocks("sh", server, tmp_path)
    command = with_options.replace('"id": "7"', '"id": "größe"')
    bash = {"cwd": tmp_path, "env": os.environ | {"LC_ALL": "C.UTF-8"}}  # dash knows no characters
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, **bash)
    assert json.loads(done.stdout)["id"] == "größe"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_file_alone_is_a_request(server, tmp_path):
    _, alone = blocks("sh", server, tmp_path)
    command = alone.strip() + " -D header"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True)
    (size,) = re.findall(r"(?i)inference-header-content-length: (\d+)", (tmp_path / "header").read_text())
    outputs = split_binary(done.stdout, int(size))
    assert json.loads(outputs["RESULT"])["text"] == outputs["TRANSCRIPT"] != ""


def test_the_python_client_runs(server, tmp_path, monkeypatch, capsys):
    (code,) = blocks("python", server, tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "wire.md", "exec"), {})
    assert capsys.readouterr().out.startswith(READ_WITH_NGRAM)


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def grpc_request(request_id="7", **text_parameters):
    data = CLIP.read_bytes()
    request = service_pb2.ModelInferRequest(model_name="quartznet_demo", id=request_id, raw_input_contents=[data])
    request.inputs.add(name="AUDIO", datatype="UINT8", shape=[1, len(data)])
    for name, value in text_parameters.items():
        request.parameters[name].string_param = value
    return request


def texts_of(answer):
    names = [output.name for output in answer.outputs]
    texts = dict(zip(names, answer.raw_output_contents, strict=True))
    assert all(int.from_bytes(text[:4], "little") == len(text) - 4 for text in texts.values())
    return {name: text[4:].decode() for name, text in texts.items()}


def test_the_grpc_messages_are_as_shown(stub):
    request = grpc_request(decoder="ngram")
    request.parameters["lm_weight"].double_param = 0.7
    request.parameters["rescore"].bool_param = False
    request.parameters["n_best"].int64_param = 2
    result = json.loads(texts_of(stub.ModelInfer(request, timeout=30))["RESULT"])
    assert (result["request_id"], result["decoder"], len(result["alternatives"])) == ("7", "ngram", 2)
    assert str(len(CLIP.read_bytes())) in PAGE


def test_numbers_may_be_text_and_none_is_unsigned(stub):
    as_text, request = grpc_request(decoder="ngram", lm_weight="0.7"), grpc_request(decoder="ngram")
    request.parameters["lm_weight"].double_param = 0.7
    assert texts_of(stub.ModelInfer(as_text, timeout=30)) == texts_of(stub.ModelInfer(request, timeout=30))
    request.parameters["n_best"].uint64_param = 2
    with pytest.raises(grpc.RpcError, match="invalid value type for 'n_best'"):
        stub.ModelInfer(request, timeout=30)


def test_grpc_answers_errors_with_the_documented_statuses(stub):
    def refusal(method, request):
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, timeout=30)
        return caught.value.code().name

    request = grpc_request()
    request.parameters["n_best"].SetInParent()
    assert refusal("ModelInfer", request) == "INVALID_ARGUMENT"
    request = grpc_request()
    request.model_version = "x"
    assert refusal("ModelInfer", request) == "INVALID_ARGUMENT"
    assert refusal("ModelStatistics", service_pb2.ModelStatisticsRequest(name="nothing")) == "INVALID_ARGUMENT"


def test_shared_memory_must_be_registered_and_large_enough(stub):
    request = grpc_request()
    output = request.outputs.add(name="RESULT")
    output.parameters["shared_memory_region"].string_param = "region"
    output.parameters["shared_memory_byte_size"].int64_param = 10
    with pytest.raises(grpc.RpcError, match="Unable to find shared memory region") as caught:
        stub.ModelInfer(request, timeout=30)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    memory = SharedMemory(create=True, size=4096)
    try:
        region = {"name": "region", "key": f"/{memory.name}", "byte_size": 4096}
        stub.SystemSharedMemoryRegister(service_pb2.SystemSharedMemoryRegisterRequest(**region), timeout=30)
        with pytest.raises(grpc.RpcError, match=r"shared memory size specified .* should be at least") as caught:
            stub.ModelInfer(request, timeout=30)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        stub.SystemSharedMemoryUnregister(service_pb2.SystemSharedMemoryUnregisterRequest(name="region"), timeout=30)
    finally:
        memory.close()
        memory.unlink()


def test_bytes_may_be_typed_numbers(stub):
    raw, typed = grpc_request(), grpc_request()
    typed.inputs[0].contents.uint_contents.extend(typed.raw_input_contents.pop())
    assert texts_of(stub.ModelInfer(typed, timeout=30)) == texts_of(stub.ModelInfer(raw, timeout=30))


def test_a_stream_answers_in_order_and_outlasts_a_failure(stub):
    requests = [grpc_request("slow", decoder="beam"), grpc_request("bad", decoder="x"), grpc_request("last")]
    slow, bad, last = stub.ModelStreamInfer(iter(requests), timeout=30)
    assert [answer.infer_response.id for answer in (slow, bad, last)] == ["slow", "bad", "last"]
    assert "wrong option: decoder" in bad.error_message
    assert texts_of(last.infer_response)["TRANSCRIPT"]


def test_the_standard_health_check_answers_for_any_service(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    is_serving = b"\x08\x01"
    assert check(b"", timeout=30) == check(b"\x0a\x04what", timeout=30) == is_serving


def test_bytes_may_be_numbers_in_json(post):
    data = CLIP.read_bytes()
    tensor = {"name": "AUDIO", "datatype": "UINT8", "shape": [1, len(data)], "data": list(data)}
    status, answer, _ = post("quartznet_demo", {"inputs": [tensor]})
    assert status == 200
    assert {output["name"] for output in json.loads(answer)["outputs"]} == {"TRANSCRIPT", "RESULT"}


def test_generate_takes_the_numbers_and_options_beside_them(post):
    status, answer, _ = post("quartznet_demo", {"AUDIO": list(CLIP.read_bytes()), "decoder": "ngram"}, path="generate")
    assert status == 200
    assert json.loads(answer)["TRANSCRIPT"].startswith(READ_WITH_NGRAM)


def test_generate_of_samples_takes_one_clip(post):
    status, answer, _ = post("quartznet_demo_pcm", {"SIGNAL": [0.0] * 16000, "SIGNAL_LENGTH": 16000}, path="generate")
    assert status == 200
    assert json.loads(answer)["TRANSCRIPT"] == ""


def test_outputs_may_come_as_bytes_on_request(post):
    clip = CLIP.read_bytes()
    status, answer, headers = post("quartznet_demo", request_of(clip, {"binary_data_output": True}), clip)
    assert status == 200
    outputs = split_binary(answer, int(headers["Inference-Header-Content-Length"]))
    assert json.loads(outputs["RESULT"])["text"] == outputs["TRANSCRIPT"] != ""


@pytest.mark.parametrize(
    ("document", "data", "expected"),
    [(request_of(b"text"), b"text", (400, "text/plain")), ({"inputs": 1}, b"", (500, "application/json"))],
    ids=["no-audio", "damaged-request"],
)
def test_the_message_of_an_error_is_in_json_whatever_its_type(document, data, expected, post):
    status, answer, headers = post("quartznet_demo", document, data)
    assert (status, headers["Content-Type"]) == expected
    assert json.loads(answer)["error"]


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_bodies_may_be_packed_and_the_header_counts_them_unpacked(post, encoding, pack):
    clip = CLIP.read_bytes()
    headers = {"Content-Encoding": encoding, "Accept-Encoding": "gzip"}
    status, answer, _ = post("quartznet_demo", request_of(clip), clip, pack=pack, **headers)
    assert status == 200
    assert {output["name"] for output in json.loads(gzip.decompress(answer))["outputs"]} == {"TRANSCRIPT", "RESULT"}


@pytest.mark.parametrize(("names", "num_repeated"), [([], 3), (["TRANSCRIPT", "RESULT"], 3), (["TRANSCRIPT"], 0)])
def test_parameters_of_an_answer_repeat_unless_one_output_is_asked_for(post, names, num_repeated):
    clip = CLIP.read_bytes()
    outputs = {"outputs": [{"name": name} for name in names]} if names else {}
    _, answer, _ = post("quartznet_demo", request_of(clip) | outputs, clip)
    pairs = []
    json.loads(answer, object_pairs_hook=lambda found: pairs.append(found) or dict(found))
    [parameters] = [found for found in pairs if found and found[0][0] == "sequence_id"]
    assert len(parameters) - len(dict(parameters)) == num_repeated


def test_rows_may_be_padded_with_anything(post):
    rows = np.full((2, 8000), 3e38, np.float32)
    rows[0], rows[1, :4000] = 0, 0
    tensors = [
        {"name": "SIGNAL", "datatype": "FP32", "shape": [2, 8000], "data": rows.ravel().tolist()},
        {"name": "SIGNAL_LENGTH", "datatype": "INT32", "shape": [2, 1], "data": [8000, 4000]},
    ]
    status, answer, _ = post("quartznet_demo_pcm", {"inputs": tensors})
    results = [json.loads(text) for text in json.loads(answer)["outputs"][0]["data"]]
    assert (status, [result["duration"] for result in results]) == (200, [0.52, 0.26])


def test_bytes_of_several_inputs_stand_in_their_order(post):
    samples, lengths = np.zeros((2, 8000), "<f4"), np.array([[4000], [8000]], "<i4")
    tensors = [
        {"name": name, "datatype": datatype, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, datatype, array in (("SIGNAL_LENGTH", "INT32", lengths), ("SIGNAL", "FP32", samples))
    ]
    status, answer, _ = post("quartznet_demo_pcm", {"inputs": tensors}, lengths.tobytes() + samples.tobytes())
    found = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    assert (status, [json.loads(text)["duration"] for text in found["RESULT"]]) == (200, [0.26, 0.52])


def test_http_answers_errors_with_the_documented_statuses(post):
    clip = CLIP.read_bytes()

    def failure(model, document, data=b""):
        status, answer, _ = post(model, document, data)
        return status, json.loads(answer)["error"]

    def says(words, status, answer):
        assert words in answer[1]
        assert answer[0] == status

    says("no samples", 400, failure("quartznet_demo", request_of(clip[:44]), clip[:44]))
    says("wrong option: decoder", 400, failure("quartznet_demo", request_of(clip, {"decoder": "x"}), clip))
    says("data-type is 'INT8'", 400, failure("quartznet_demo", request_of(clip, datatype="INT8"), clip))
    says("Failed to open encoded data", 400, failure("quartznet_demo", request_of(b"hello"), b"hello"))
    says("'n_best' has invalid type", 400, failure("quartznet_demo", request_of(clip, {"n_best": None}), clip))
    says("unknown model", 404, failure("nothing", request_of(clip), clip))
    says("Request timeout expired", 503, failure("quartznet_demo", request_of(clip, {"timeout": 1}), clip))
    says("failed to parse the request JSON", 500, failure("quartznet_demo", b"{"))
