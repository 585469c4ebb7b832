"""The checked-in models on a real server, at the edges: each answer says what is wrong with which clip."""

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_serving.launcher import Server
from tritonclient.utils import InferenceServerException

CLIPS = Path(__file__).parents[2] / "demo" / "clips"
RATE_HZ = 16_000
LIMIT = 60 * RATE_HZ


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, 3 * RATE_HZ).astype(np.float32)


def transcribe(models, rows: Sequence[np.ndarray], lengths: Sequence[int]) -> list[dict]:
    tensors = {"SIGNAL": np.stack(rows), "SIGNAL_LENGTH": np.array(lengths, np.int32)[:, None]}
    answer = models.infer("quartznet_demo_pcm", **tensors)
    results = [json.loads(text) for text in answer["RESULT"][:, 0]]
    transcripts = [text.decode() for text in answer["TRANSCRIPT"][:, 0]]
    assert transcripts == [result.get("text", "") for result in results]
    return results


def test_the_longest_clip_passes(models):
    (result,) = transcribe(models, [np.zeros(LIMIT, np.float32)], [LIMIT])
    assert result["duration"] == pytest.approx(60.0, abs=0.05)


def test_the_features_stage_joins_no_requests(models, noise, wait_until):
    """Triton's own DALI backend joins them by a call to CUDA, and failed for all of them where there was no driver."""
    before = models.executions("quartznet_demo_features")
    requests = [
        {"SIGNAL": np.stack([noise] * rows), "SIGNAL_LENGTH": np.full((rows, 1), len(noise), np.int32)}
        for rows in (1, 2) * 8
    ]
    models.infer_at_once("quartznet_demo_features", requests)
    # Triton counts a request after it has answered it.
    wait_until(lambda: models.executions("quartznet_demo_features") == before + len(requests))


def test_the_memory_of_a_long_clip_is_kept_for_the_next_one(server, connect, make_server, stubs_of):
    if not isinstance(server, Server):
        pytest.skip("the server is in a container, where its processes cannot be seen")
    with make_server(server.repository, models=["quartznet_demo_pcm"]) as fresh:
        features = stubs_of(fresh)["quartznet_demo_features_0_0"]
        held = []
        for seconds in (20, 20, 2, 2, 2):
            transcribe(connect(fresh.grpc_url), [np.zeros(seconds * RATE_HZ, np.float32)], [seconds * RATE_HZ])
            held.append(features.memory_info().data)
        assert held[-1] >= held[1]  # 1 to 14 MiB less without `KEPT_MEMORY`


def test_the_memory_of_a_recording_that_is_far_too_long_is_given_back(server, models, stubs_of):
    decoders = [stub for name, stub in stubs_of(server).items() if name.startswith("audio_decode")]
    assert len(decoders) == 4
    before = sum(decoder.memory_info().rss for decoder in decoders)
    for seconds in (600, *[1] * 8):  # an instance gives it back with its next clip
        file = io.BytesIO()
        soundfile.write(file, np.zeros(seconds * 48_000, np.int16), 48_000, format="FLAC")
        models.infer("audio_decode", AUDIO=np.frombuffer(file.getvalue(), np.uint8)[None])
    after = sum(decoder.memory_info().rss for decoder in decoders)
    assert after - before < 50 * 2**20  # 110 MiB with DALI's pool


def test_a_length_that_lies_is_an_error_beside_longer_clips_too(models, noise):
    # In a batch with longer rows there are frames after the short clip's end; they are not the clip's.
    def attempt(clip):
        try:
            transcribe(models, [clip[0]], [clip[1]])
        except InferenceServerException as error:
            return error.message()
        return ""

    long = np.resize(noise, 10 * RATE_HZ)
    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(attempt, [(long, len(long)), (noise, 5 * RATE_HZ)] * 8))
    assert not any(messages[0::2])
    assert all("too few samples" in message for message in messages[1::2])


def test_a_request_is_not_worked_on_after_its_own_timeout(models):
    def send(file, timeout=None):
        try:
            models.infer("quartznet_demo", timeout=timeout, AUDIO=np.frombuffer(file, np.uint8)[None])
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
