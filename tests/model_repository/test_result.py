"""TRANSCRIPT and RESULT of real speech, and what of both may be read in the server's log: nothing."""

import contextlib
import json
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

MODEL = "quartznet_demo"
FRAME_S = 0.0401
"""A clip lasts whole frames, of at most 0.04 s, of which the last may pass its end."""
MARKER = -0.12345679  # a sample that cannot be mistaken, as for a time of day
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "model_repository" / "result.schema.json").read_text())
)
QUIET = {"log_info": False, "log_verbose_level": 0}


@pytest.fixture(scope="module")
def answers(models, clip_files) -> list[dict[str, np.ndarray]]:
    return [models.infer(MODEL, AUDIO=file) for file in clip_files.values()]


@pytest.fixture(scope="module")
def results(answers) -> list[dict]:
    return [json.loads(answer["RESULT"].item()) for answer in answers]


def test_a_result_is_as_the_schema_has_it_and_names_its_model_and_decoder(results):
    for result in results:
        SCHEMA.validate(result)
        assert (result["model"], result["version"], result["decoder"]) == (MODEL, "1", "greedy")


def test_every_decoder_s_result_is_as_the_schema_has_it(sdk, clip_files):
    clip = next(iter(clip_files.values())).tobytes()
    SCHEMA.validate(dict(sdk.transcribe(clip, decoder="beam", n_best=3).raw))
    silence = np.zeros(16_000, np.float32), 16_000
    SCHEMA.validate(dict(sdk.transcribe(silence, decoder="beam").raw))


def test_the_schema_takes_nothing_else():
    assert not SCHEMA.is_valid({"error": 1})
    assert not SCHEMA.is_valid({"text": "a"})


def test_the_schema_describes_every_field_and_takes_those_of_later_versions(sdk, clip_files):
    clip = next(iter(clip_files.values())).tobytes()
    result = dict(sdk.transcribe(clip, decoder="beam", n_best=3).raw)
    kinds = SCHEMA.schema["$defs"]
    assert result.keys() == kinds["transcript"]["properties"].keys()
    assert result["words"][0].keys() == kinds["word"]["properties"].keys()
    assert result["alternatives"][0].keys() == kinds["alternative"]["properties"].keys()
    SCHEMA.validate(result | {"language": "en", "words": [word | {"speaker": 1} for word in result["words"]]})


def test_the_transcript_is_the_text_and_the_words_make_it(answers, results):
    for answer, result in zip(answers, results, strict=True):
        assert answer["TRANSCRIPT"].item().decode() == result["text"]
        assert " ".join(word["word"] for word in result["words"]) == result["text"] != ""


def test_words_follow_one_another_within_the_clip(results):
    for result in results:
        times = [time for word in result["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= result["duration"]
        assert all(word["start"] < word["end"] for word in result["words"])


def test_the_duration_is_that_of_the_samples(results, signals):
    for result, signal in zip(results, signals.values(), strict=True):
        assert result["duration"] == pytest.approx(len(signal) / 16_000, abs=FRAME_S)


def test_confidences_are_probabilities(results):
    for result in results:
        assert all(0 <= item["confidence"] <= 1 for item in [result, *result["words"]])


@contextlib.contextmanager
def talkative(client):
    """Has the server log all it can for a while."""
    client.update_log_settings({"log_info": True, "log_verbose_level": 1})
    try:
        yield
    finally:
        client.update_log_settings(QUIET)


def test_neither_transcripts_nor_audio_reach_the_log(server, models, clip_files, results):
    secrets = [result["text"] for result in results]
    for words in [text.split() for text in secrets]:  # "in the" alone is in any log
        secrets += [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]
    secrets += ["what I say is private", str(MARKER)[:7]]
    signal = np.full((1, 16_000), MARKER, np.float32)
    not_audio = np.frombuffer(b"what I say is private " * 9, np.uint8)[None]
    with talkative(models.client):
        lines = []  # the server's own list keeps the last ones alone
        for file in clip_files.values():
            models.infer(MODEL, AUDIO=file)
            lines += server.log
        models.infer(f"{MODEL}_pcm", SIGNAL=signal, SIGNAL_LENGTH=np.array([[16_000]], np.int32))
        lines += server.log
        models.infer_at_once(MODEL, [{"AUDIO": not_audio}])
        time.sleep(0.2)  # the log is read by a thread of its own
        log = "\n".join([*lines, *server.log])
    assert f"{MODEL}_acoustic" in log  # it does speak of the requests
    assert [secret for secret in secrets if secret in log] == []
