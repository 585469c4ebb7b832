"""The checked-in models on a real server, at the edges: each answer says what is wrong with which clip."""

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

CLIPS = Path(__file__).parents[2] / "demo" / "clips"
RATE_HZ = 16_000
LIMIT = 60 * RATE_HZ
# Confidences are rounded to 4 digits, which small differences of log-probabilities may turn over.
CONFIDENCE_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, 3 * RATE_HZ).astype(np.float32)


def transcribe(client, rows: Sequence[np.ndarray], lengths: Sequence[int]) -> list[dict]:
    values = {"SIGNAL": np.stack(rows), "SIGNAL_LENGTH": np.array(lengths, np.int32)[:, None]}
    inputs = []
    for (name, value), datatype in zip(values.items(), ("FP32", "INT32"), strict=True):
        inputs.append(triton.InferInput(name, value.shape, datatype))
        inputs[-1].set_data_from_numpy(value)
    answer = client.infer("quartznet_demo_pcm", inputs)
    results = [json.loads(text) for text in answer.as_numpy("RESULT")[:, 0]]
    transcripts = [text.decode() for text in answer.as_numpy("TRANSCRIPT")[:, 0]]
    assert transcripts == [result.get("text", "") for result in results]
    return results


def test_a_result_has_the_documented_fields(client, noise):
    (result,) = transcribe(client, [noise], [len(noise)])
    assert list(result) == ["text", "words", "confidence", "duration", "model", "decoder"]
    assert result["model"] == "quartznet_demo"
    assert result["decoder"] == "greedy"
    assert result["duration"] == pytest.approx(3.0, abs=0.05)
    assert [word["word"] for word in result["words"]] == result["text"].split()


def test_a_row_says_the_same_alone_and_beside_others(client, noise):
    quiet = noise * 0.3
    lengths = [len(noise), RATE_HZ, 2 * RATE_HZ]
    together = transcribe(client, [noise, quiet, noise], lengths)
    for row, length, result in zip([noise, quiet, noise], lengths, together, strict=True):
        (alone,) = transcribe(client, [row[:length]], [length])
        assert alone["text"] == result["text"]
        assert alone["duration"] == result["duration"]
        assert alone["confidence"] == pytest.approx(result["confidence"], abs=CONFIDENCE_TOLERANCE)


def test_a_file_says_the_same_alone_and_in_a_crowd(client):
    def listen(file: bytes) -> bytes:
        value = np.frombuffer(file, np.uint8)[None]
        audio = triton.InferInput("AUDIO", value.shape, "UINT8")
        audio.set_data_from_numpy(value)
        return client.infer("quartznet_demo", [audio]).as_numpy("TRANSCRIPT")[0, 0]

    files = [path.read_bytes() for path in sorted(CLIPS.iterdir()) if path.suffix != ".jsonl"]
    alone = [listen(file) for file in files]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(listen, files * 4)) == alone * 4


@pytest.mark.parametrize(
    ("samples", "length", "message"),
    [
        (RATE_HZ, 0, "no samples: .* SIGNAL_LENGTH is 0 or less"),
        (0, 0, "no samples"),
        (RATE_HZ, -7, "no samples"),
        (RATE_HZ, 2 * RATE_HZ, "too few samples: .* counts 2.0. s"),
        (10, LIMIT + RATE_HZ, "too long: .* at most 60 s long, but this one has 61.0 s"),
        (LIMIT + RATE_HZ, LIMIT + RATE_HZ, "too long: .* but this one has 61.0 s"),
        (LIMIT + 160, LIMIT + 160, "too long"),
    ],
)
def test_a_clip_that_cannot_be_transcribed_is_an_error(client, samples, length, message):
    with pytest.raises(InferenceServerException, match=message) as error:
        transcribe(client, [np.zeros(samples, np.float32)], [length])
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_longest_clip_passes(client):
    (result,) = transcribe(client, [np.zeros(LIMIT, np.float32)], [LIMIT])
    assert result["duration"] == pytest.approx(60.0, abs=0.05)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_an_error(client, noise, value):
    bad = noise.copy()
    bad[1234] = value
    with pytest.raises(InferenceServerException, match="not finite"):
        transcribe(client, [bad], [len(bad)])


def test_a_bad_row_leaves_the_others_of_its_request_alone(client, noise):
    bad = noise.copy()
    bad[0] = np.nan
    first, second, third, fourth = transcribe(
        client, [noise, bad, noise, noise], [len(noise), len(noise), 0, 4 * RATE_HZ]
    )
    assert first == transcribe(client, [noise], [len(noise)])[0]
    assert list(second) == list(third) == list(fourth) == ["error"]
    assert "not finite" in second["error"]
    assert "no samples" in third["error"]
    assert "too few samples" in fourth["error"]


def test_a_request_whose_rows_all_fail_is_an_error(client, noise):
    with pytest.raises(InferenceServerException, match=r"no samples: .*first of 2 rows; all failed"):
        transcribe(client, [noise, noise], [0, 0])


def test_a_length_that_lies_is_an_error_beside_longer_clips_too(client, noise):
    # In a batch with longer rows there are frames after the short clip's end; they are not the clip's.
    def attempt(clip: tuple[np.ndarray, int]) -> str:
        try:
            transcribe(client, [clip[0]], [clip[1]])
        except InferenceServerException as error:
            return error.message()
        return ""

    long = np.resize(noise, 10 * RATE_HZ)
    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(attempt, [(long, len(long)), (noise, 5 * RATE_HZ)] * 8))
    assert not any(messages[0::2])
    assert all("too few samples" in message for message in messages[1::2])


def test_a_request_is_not_worked_on_after_its_own_timeout(client):
    def send(file: bytes, timeout: int | None = None) -> Exception | None:
        value = np.frombuffer(file, np.uint8)[None]
        audio = triton.InferInput("AUDIO", value.shape, "UINT8")
        audio.set_data_from_numpy(value)
        try:
            client.infer("quartznet_demo", [audio], timeout=timeout)
        except InferenceServerException as error:
            return error
        return None

    clip = (CLIPS / "harbour.flac").read_bytes()
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(1800 * RATE_HZ, np.int16), RATE_HZ, format="FLAC")  # keeps a decoder busy
    with ThreadPoolExecutor(24) as pool:
        busy = [pool.submit(send, silence.getvalue()) for _ in range(12)]
        late = [pool.submit(send, clip, 1000) for _ in range(12)]  # microseconds
        patient = send(clip)
    assert any("timeout expired" in str(future.result()) for future in late)
    assert all("too long" in str(future.result()) for future in busy)
    assert patient is None
