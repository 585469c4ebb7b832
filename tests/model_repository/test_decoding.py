"""Decoding options on the server: each request its own, in shared batches, and as offline."""

import concurrent.futures
import functools
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from carnelian_client import CarnelianClient, InvalidOption
from carnelian_export.model_configs import read_config
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server
from carnelian_training.checkpoint import load_model
from carnelian_training.ctc import Decoder
from carnelian_training.data.manifest import read_manifest
from carnelian_training.evaluation.evaluate import evaluate, frame_duration_s
from carnelian_training.language_models.weights import read_weights
from google.protobuf import text_format
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).parents[2]
MODEL = "quartznet_demo"
CLIPS = ROOT / "demo" / "clips" / "manifest.jsonl"
OPTIONS = [
    {},
    {"decoder": "beam", "n_best": 4},
    {"decoder": "beam", "beam_width": 20, "beam_threshold": 8.5},
    {"decoder": "beam", "hotwords": ["lighthouse", "the stairs"], "hotword_boost": 9.5},
    {"decoder": "ngram", "lm_weight": 0.55, "n_best": 2},
    {"decoder": "ngram", "rescore": True, "n_best": 2},
]
DEPLOYED = ROOT / "model_repository" / "quartznet_demo_ctc" / "1"


@pytest.fixture(scope="module")
def clip() -> bytes:
    return (ROOT / "demo" / "clips" / "harbour.flac").read_bytes()


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_served_is_offline(sdk, options):
    config, network = load_model(ROOT / "demo" / "quartznet_demo.pt")
    models = {"language_model": DEPLOYED / "english.klm", "neural_language_model": DEPLOYED / "english.onnx"}
    decoder = Decoder(config.labels, frame_duration_s(config), **models)
    weights = read_weights(ROOT / "demo" / "lm_weights.json", *models.values())
    wanted = decoder.read_options(options, decoder.change_options(weights))
    offline = evaluate(network, config, CLIPS, decoder=decoder, options=wanted)
    paths = [clip.audio_filepath for clip in read_manifest(CLIPS)]
    served = [outcome.text for outcome in sdk.transcribe_many(paths, **options)]
    assert served == list(offline.transcripts)


@pytest.mark.parametrize("seconds", [1, 3, 20])
def test_nothing_is_read_greedily_from_digital_silence(sdk, seconds):
    assert sdk.transcribe((np.zeros(16_000 * seconds, np.float32), 16_000)).text == ""


def test_requests_with_different_options_share_a_batch(batch_sizes_of, sdk, clip):
    alone = [sdk.transcribe(clip, **options).raw for options in OPTIONS]
    answers = {}

    def send():
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            wanted = OPTIONS * 4
            results = pool.map(lambda options: sdk.transcribe(clip, **options).raw, wanted)
            answers.update(enumerate(results))

    for _ in range(5):  # batches form by themselves, not on demand
        batches = batch_sizes_of(f"{MODEL}_ctc", 4 * len(OPTIONS), send)
        for i, answer in answers.items():
            expected = alone[i % len(OPTIONS)]
            assert answer | {"request_id": ""} == dict(expected) | {"request_id": ""}
        if max(batches) > 1:
            return
    pytest.fail("no batch of more than one row formed")


def scores(frames: int = 50, rows: int = 3) -> np.ndarray:
    """[rows, frames, 29] float32 log-probabilities, of nothing in particular."""
    logits = np.random.default_rng(0).standard_normal((rows, frames, 29)).astype(np.float32)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 7.0])
def test_what_is_no_log_probability_is_refused_alone(models, bad):
    rows = scores()
    rows[0, 20, 4] = 0.005  # as float16 may round
    rows[1, 20, 4] = bad  # of a letter, not of the blank
    answer = models.infer(f"{MODEL}_ctc", LOG_PROBS=rows, LOG_PROB_LENGTH=np.full((3, 1), 50, np.int32))
    first, middle, last = [json.loads(text) for text in answer["RESULT"][:, 0]]
    assert "not finite" in middle["error"]
    assert first["text"]
    assert last["text"]


def test_a_request_of_no_rows_that_holds_one_raises_nothing(server):
    """What the stage raises fails all requests of its batch."""
    tensors = [InferInput("LOG_PROBS", [1, 8, 29], "FP32"), InferInput("LOG_PROB_LENGTH", [1, 1], "INT32")]
    for tensor, values in zip(tensors, (scores(8, rows=1), np.array([[8]], np.int32)), strict=True):
        tensor.set_data_from_numpy(values)
        tensor.set_shape([0, *values.shape[1:]])
    with InferenceServerClient(server.grpc_url) as client:
        answer = client.infer(f"{MODEL}_ctc", tensors, client_timeout=30)
    assert "text" in json.loads(answer.as_numpy("RESULT").item())


def test_bytes_that_are_no_text_fail_their_request_alone(server):
    tensors = [
        {"name": "LOG_PROBS", "datatype": "FP32", "shape": [1, 50, 29], "data": scores(rows=1).ravel().tolist()},
        {"name": "LOG_PROB_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [50]},
    ]

    def post(**fields):
        body = json.dumps({"inputs": tensors, **fields}).replace("NOT UTF-8", "\xff").encode("latin-1")
        request = urllib.request.Request(f"http://{server.http_url}/v2/models/{MODEL}_ctc/infer", body)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.loads(answer.read().decode("latin-1"))

    (result,) = [output for output in post(id="NOT UTF-8")["outputs"] if output["name"] == "RESULT"]
    assert json.loads(result["data"][0])["request_id"] == ""
    with pytest.raises(urllib.error.HTTPError) as failure:
        post(parameters={"decoder": "NOT UTF-8"})
    assert b"must be text in UTF-8" in failure.value.read()


def test_an_error_of_the_decoder_is_one_clips_alone(tmp_path, connect, make_server):
    shutil.copytree(ROOT / "model_repository" / f"{MODEL}_ctc", tmp_path / f"{MODEL}_ctc")
    config = tmp_path / f"{MODEL}_ctc" / "config.pbtxt"
    both = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 30000000 }"
    text = config.read_text()
    assert "dynamic_batching {\n}" in text
    config.write_text(text.replace("dynamic_batching {\n}", both))
    package = tmp_path / f"{MODEL}_ctc" / "1" / "ctc" / "greedy.py"
    # The log shows this line, and must not show what it says of the clip.
    fault = "    assert all(len(clip) != 7 for clip in clips), 2 * 'private'\n    if not clips:\n"
    package.write_text(package.read_text().replace("    if not clips:\n", fault))
    inputs = {"LOG_PROBS": scores(), "LOG_PROB_LENGTH": np.array([[50], [7], [50]], np.int32)}
    with make_server(tmp_path) as running, concurrent.futures.ThreadPoolExecutor(2) as pool:
        infer = functools.partial(connect(running.grpc_url).infer, f"{MODEL}_ctc", **inputs)
        requests = [pool.submit(infer, parameters=options) for options in ({}, {"decoder": "beam", "n_best": 2})]
        greedy, beam = ([json.loads(row) for row in request.result()["RESULT"][:, 0]] for request in requests)
    assert ["error" in result for result in greedy] == [False, True, False]
    assert "not decoded" in greedy[1]["error"]
    # Each by its own options, when the clips of the batch are decoded one by one.
    assert [len(result["alternatives"]) for result in (*greedy[::2], *beam)] == [0, 0, 2, 2, 2]
    assert any("decoding failed: AssertionError" in line for line in running.log)
    assert not any("privateprivate" in line for line in running.log)


def test_another_model_has_its_name_version_and_labels_in_results_and_metrics(tmp_path, connect, make_server):
    rename(folder := tmp_path / "renamed_ctc", "")
    (folder / "1").rename(folder / "3")
    settings = json.loads((folder / "3" / "ctc.json").read_text())
    settings["labels"][-2:] = '"', "\\"  # which JSON escapes
    (folder / "3" / "ctc.json").write_text(json.dumps(settings))
    inputs = {"LOG_PROBS": scores(), "LOG_PROB_LENGTH": np.array([[50], [50], [50]], np.int32)}
    with make_server(tmp_path) as running:
        results = connect(running.grpc_url).infer("renamed_ctc", **inputs)["RESULT"][:, 0]
        with urllib.request.urlopen(running.metrics_url, timeout=60) as answer:
            assert 'carnelian_frames_total{model="renamed"}' in answer.read().decode()
    results = [json.loads(text) for text in results]
    assert [(result["model"], result["version"]) for result in results] == [("renamed", "3")] * 3
    assert [" ".join(word["word"] for word in result["words"]) for result in results] == [
        result["text"] for result in results
    ]
    assert set('"\\') <= set("".join(result["text"] for result in results))


def test_a_stage_whose_answers_depend_on_options_is_not_cached(tmp_path, make_server):
    rename(tmp_path / "cached_ctc", "response_cache { enable: true }")
    with pytest.raises(ServerError, match="`response_cache` of cached_ctc must be off"):
        make_server(tmp_path).start()


def test_settings_that_are_not_as_exported_are_named(tmp_path, make_server):
    found = {
        '{"labels": ["a"': "Expecting ',' delimiter",
        '{"labels": ["a"]}': "it has no 'frame_s'",
        '{"labels": 3}': "'int' object is not iterable",
        '["a"]': "list indices must be integers",
        '{"labels": ["a"], "frame_s": "x"}': "could not convert string to float: 'x'",
        '{"labels": ["a"], "frame_s": 0, "max_audio_s": 60}': "`frame_s` must be a finite number above 0, but is 0.0",
        '{"labels": ["a"], "frame_s": 0.02, "max_audio_s": NaN}': "`max_audio_s` must be a finite number above 0, but",
        '{"labels": ["a"], "frame_s": 0.02, "max_audio_s": Infinity}': "`max_audio_s` must be a finite number above 0",
        '{"labels": ["a"], "frame_s": 0.02, "max_audio_s": 60}': "`labels` must be one fewer than the last dimension "
        "of LOG_PROBS in config.pbtxt, 29, which also has the blank, but are 1",
        "[" * 100_000: "maximum recursion depth exceeded",
    }
    files = []
    for number, content in enumerate(found):
        rename(folder := tmp_path / f"broken{number}_ctc", "")
        files.append(folder / "1" / "ctc.json")
        files[-1].write_text(content)
    with pytest.raises(ServerError) as failure:
        make_server(tmp_path).start()
    for file, words in zip(files, found.values(), strict=True):
        assert f"{file} must be as carnelian-export wrote it, but: {words}" in str(failure.value)


def rename(folder: Path, more: str) -> None:
    """Copies the decoding stage under another name, with more in its configuration and no language models."""
    shutil.copytree(ROOT / "model_repository" / f"{MODEL}_ctc", folder, ignore=shutil.ignore_patterns("english.*"))
    config = read_config(folder / "config.pbtxt")
    config.name = folder.name
    for name in ("language_model", "neural_language_model"):
        del config.parameters[name]
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config) + more)


def test_without_kenlm_a_model_still_decodes_greedily(tmp_path, connect, make_server):
    shutil.copytree(ROOT / "model_repository" / f"{MODEL}_ctc", tmp_path / f"{MODEL}_ctc")
    program = tmp_path / f"{MODEL}_ctc" / "1" / "model.py"
    source = program.read_text()
    assert source.count("\nimport asyncio") == 1
    program.write_text(source.replace("\nimport asyncio", '\nimport sys\nsys.modules["kenlm"] = None\nimport asyncio'))
    inputs = {"LOG_PROBS": scores(), "LOG_PROB_LENGTH": np.array([[50], [50], [50]], np.int32)}
    with make_server(tmp_path) as running:
        client = connect(running.grpc_url)
        results = [json.loads(text) for text in client.infer(f"{MODEL}_ctc", **inputs)["RESULT"][:, 0]]
        with pytest.raises(InferenceServerException, match="decoder must be one of greedy, beam"):
            client.infer(f"{MODEL}_ctc", parameters={"decoder": "ngram"}, **inputs)
        assert any("needs the module kenlm, which is not installed" in line for line in running.log)
    assert [result["decoder"] for result in results] == ["greedy"] * 3


def test_a_wrong_option_fails_alone(sdk, clip):
    expected = sdk.transcribe(clip).text
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wrong = [pool.submit(sdk.transcribe, clip, decoder="beam", beam_width=0) for _ in range(4)]
        right = [pool.submit(sdk.transcribe, clip) for _ in range(4)]
        assert [future.result().text for future in right] == [expected] * 4
        for future in wrong:
            with pytest.raises(InvalidOption, match="beam_width must be a whole number from 1 to 500, but is 0"):
                future.result()


STAGES = {
    "audio_decode": {"AUDIO": np.zeros((1, 9), np.uint8)},
    f"{MODEL}_features": {"SIGNAL": np.zeros((1, 800), np.float32), "SIGNAL_LENGTH": np.array([[800]], np.int32)},
    f"{MODEL}_ctc": {"LOG_PROBS": np.zeros((1, 5, 29), np.float32), "LOG_PROB_LENGTH": np.array([[5]], np.int32)},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("request_id", "parameters", "words"),
    [
        ("é" * 513, {}, "the `id` of a request must have at most 1,024 bytes, but this one has 1,026"),
        ("7", {"decoder": "v" * 5_000_000}, "the `parameters` of a request must have at most 5,000,000 bytes, but"),
        ("7", {"v" * 5_000_000: 1}, "the `parameters` of a request must have at most 5,000,000 bytes, but"),
    ],
)
def test_what_no_caller_needs_is_refused_by_the_first_stage(server, models, stage, request_id, parameters, words):
    """Each stage kept room for a copy, for good."""
    if not isinstance(server, Server) and not stage.endswith("_ctc"):
        pytest.skip("the native backends are not ours")
    with pytest.raises(InferenceServerException, match=f"wrong option: {words}") as refused:
        models.infer(stage, request_id=request_id, parameters=parameters, **STAGES[stage])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_longest_id_and_the_longest_list_of_hot_words_pass(models, clip):
    audio = np.frombuffer(clip, np.uint8)[None]
    longest_id = "é" * 512
    answer = models.infer(MODEL, request_id=longest_id, AUDIO=audio)
    assert json.loads(answer["RESULT"].item())["request_id"] == longest_id
    longest = json.dumps(["\U0001e900" * 30] * 10_000)  # of Unicode's highest letters, each escaped
    with pytest.raises(InferenceServerException, match="wrong option: hotwords cannot be heard"):
        models.infer(MODEL, parameters={"decoder": "beam", "hotwords": longest}, AUDIO=audio)


def test_an_option_that_does_not_exist_is_answered_with_those_that_do(sdk, clip):
    with pytest.raises(InvalidOption, match=r"an option must be one of decoder, .*'bean_width'"):
        sdk.transcribe(clip, bean_width=3)


def test_options_reach_the_decoder_through_the_ensemble_of_samples_too(models):
    signal, length = np.zeros((2, 16_000), np.float32), np.full((2, 1), 16_000, np.int32)
    options = {"decoder": "beam"}
    answer = models.infer(f"{MODEL}_pcm", parameters=options, request_id="mine", SIGNAL=signal, SIGNAL_LENGTH=length)
    results = [json.loads(text) for text in answer["RESULT"][:, 0]]
    assert [(result["decoder"], result["request_id"]) for result in results] == [("beam", "mine")] * 2


def test_requests_of_the_sdk_carry_their_ids(server, clip):
    with CarnelianClient(server.grpc_url) as client:
        transcript = client.transcribe(clip, request_id="my-clip", decoder="beam", n_best=2)
    assert (transcript.request_id, transcript.raw["request_id"]) == ("my-clip", "my-clip")
    assert transcript.alternatives[0].text == transcript.text
    assert transcript.alternatives[0].score >= transcript.alternatives[1].score
