"""Rescoring on the server: `<model>_ctc` alone, with the smallest neural language model, and as offline."""

import concurrent.futures
import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from carnelian_export.model_configs import read_config
from carnelian_training.ctc import Calibration, Decoder
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

SHIPPED = Path(__file__).parents[2] / "model_repository"
SCHEMA = jsonschema.Draft202012Validator(json.loads((SHIPPED / "result.schema.json").read_text()))
MODEL = "quartznet_demo_ctc"
OPTIONS = [
    {},
    {"decoder": "ngram", "rescore": False, "n_best": 3},
    {"decoder": "ngram", "rescore": True, "n_best": 3},
    {"decoder": "beam", "rescore": "true", "rescore_weight": "1.5", "rescore_depth": 10},
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory, write_language_model) -> Path:
    folder = tmp_path_factory.mktemp("rescoring")
    shutil.copytree(SHIPPED / MODEL, folder / MODEL)
    write_language_model(folder / MODEL / "1" / "tiny.onnx", "abcdefghijklmnopqrstuvwxyz'")
    config = read_config(folder / MODEL / "config.pbtxt")
    config.parameters["neural_language_model"].string_value = "tiny.onnx"
    config.parameters["rescore"].string_value = "true"  # which the default decoder, the greedy one, does not do
    (folder / MODEL / "config.pbtxt").write_text(text_format.MessageToString(config))
    return folder


@pytest.fixture(scope="module")
def stage(repository, connect, make_server):
    with make_server(repository) as server:
        yield connect(server.grpc_url)


@pytest.fixture(scope="module")
def clips() -> list[np.ndarray]:
    """Unsure ones, of random lengths."""
    rng = np.random.default_rng(0)
    clips = [rng.normal(scale=2, size=(frames, 29)) for frames in (40, 23, 60, 31)]
    return [(clip - np.log(np.exp(clip).sum(1, keepdims=True))).astype(np.float32) for clip in clips]


def ask(models, clip: np.ndarray, parameters: dict) -> dict:
    length = np.array([[len(clip)]], np.int32)
    answer = models.infer(MODEL, parameters=parameters, LOG_PROBS=clip[None], LOG_PROB_LENGTH=length)
    return json.loads(answer["RESULT"].item())


@pytest.mark.parametrize("options", OPTIONS)
def test_served_is_offline(stage, repository, clips, options):
    version = repository / MODEL / "1"
    settings = json.loads((version / "ctc.json").read_text())
    models = {"language_model": version / "english.klm", "neural_language_model": version / "tiny.onnx"}
    calibration = Calibration.read(version / "calibration.json")
    decoder = Decoder(settings["labels"], settings["frame_s"], calibration=calibration, **models)
    parameters = read_config(repository / MODEL / "config.pbtxt").parameters
    defaults = {name: parameters[name].string_value for name in parameters if name not in models}
    wanted = decoder.read_options(options, decoder.change_options(defaults))
    for clip in clips:
        served = ask(stage, clip, options)
        (offline,) = decoder.decode([clip], [wanted])
        assert (served["text"], served["confidence"]) == (offline.text, offline.confidence)
        assert served["words"] == [word._asdict() for word in offline.words]
        assert served["alternatives"] == [vars(reading) for reading in offline.alternatives]
        assert served["rescored"] is bool(options.get("rescore"))
        SCHEMA.validate(served)


def test_requests_with_and_without_rescoring_at_once_are_as_alone_and_a_wrong_one_fails_by_itself(stage, clips):
    wrong = {"rescore": "true"}  # the decoder is greedy
    alone = [ask(stage, clip, options) for clip in clips for options in OPTIONS]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        refused = [pool.submit(ask, stage, clip, wrong) for clip in clips]
        together = [pool.submit(ask, stage, clip, options) for clip in clips for options in OPTIONS]
    assert [future.result() for future in together] == alone
    for future in refused:
        with pytest.raises(InferenceServerException, match="rescore must come with decoder beam or ngram"):
            future.result()
