"""The Python-based backends as Triton runs them: one server holds a model for each thing that they do."""

import collections
import io
import os
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import soundfile
from tritonclient.utils import InferenceServerException


def signal(samples: int, length: int, rows: int = 1) -> dict[str, np.ndarray]:
    values = np.random.default_rng(samples).standard_normal((rows, samples)).astype(np.float32)
    return {"SIGNAL": values, "LENGTH": np.full((rows, 1), length, np.int32)}


def test_requests_of_different_lengths_run_as_one_batch(client):
    requests = [signal(5, 3), signal(7, 2), signal(6, 6)]
    before = client.executions("cut")
    answers = client.infer_at_once("cut", requests)
    assert client.executions("cut") == before + 1
    for request, answer in zip(requests, answers, strict=True):
        length = request["LENGTH"].item()
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :length])
        np.testing.assert_array_equal(answer["DOUBLE"], request["SIGNAL"] * 2)


@pytest.mark.parametrize(("model", "together"), [("padded", 4), ("padded_by_five_threads", 5)])
def test_four_requests_run_at_a_time_on_a_cpu_or_one_on_each_thread(client, model, together):
    requests = [signal(samples, 1) for samples in range(1, 7)]
    before = client.executions(model)
    answers = client.infer_at_once(model, requests)
    assert client.executions(model) == before + 1
    widths = collections.Counter(answer["DOUBLE"].shape[1] for answer in answers)  # of the longest that ran beside
    assert sorted(widths.values()) == [6 - together, together]
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :1])
        np.testing.assert_array_equal(np.trim_zeros(answer["DOUBLE"][0]), request["SIGNAL"][0])


def test_the_rows_of_a_request_run_together(client):
    large, small = client.infer_at_once("padded", [signal(5, 2, rows=5), signal(7, 2)])
    assert large["DOUBLE"].shape == (5, 5)
    assert small["DOUBLE"].shape == (1, 7)


def test_rows_of_a_request_come_back_in_order(client):
    request = signal(5, 4, rows=3)
    np.testing.assert_array_equal(client.infer("cut", **request)["CUT"], request["SIGNAL"][:, :4])


def test_a_request_without_samples_passes(client):
    empty, full = client.infer_at_once("cut", [signal(0, 0), signal(4, 2, rows=2)])
    assert empty["DOUBLE"].shape == (1, 0)
    assert full["DOUBLE"].shape == (2, 4)


def test_a_dali_error_is_answered_alone_and_the_pipeline_lives_on(client):
    requests = [signal(5, 3), signal(6, 9), signal(7, 2)]
    before = client.executions("cut")
    first, bad, last = client.infer_at_once("cut", requests)
    assert client.executions("cut") == before + 1
    np.testing.assert_array_equal(first["CUT"], requests[0]["SIGNAL"][:, :3])
    np.testing.assert_array_equal(last["CUT"], requests[2]["SIGNAL"][:, :2])
    assert isinstance(bad, InferenceServerException)
    assert "DALI operator nvidia.dali.fn.slice: Slice can't be placed out of bounds" in bad.message()
    assert "dali.py" not in bad.message()  # no paths of the server
    assert bad.status() == "StatusCode.UNKNOWN"  # as the native backend answers
    again = signal(5, 3, rows=3)
    np.testing.assert_array_equal(client.infer("cut", **again)["CUT"], again["SIGNAL"][:, :3])


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_in_one_part_of_a_batch_is_answered_alone(client, place):
    requests = [signal(samples, 1) for samples in range(1, 7)]
    requests[place]["LENGTH"][:] = 9
    before = client.executions("padded")
    answers = client.infer_at_once("padded", requests)
    assert client.executions("padded") == before + 1
    assert isinstance(answers.pop(place), InferenceServerException)
    for request, answer in zip(requests[:place] + requests[place + 1 :], answers, strict=True):
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :1])
        np.testing.assert_array_equal(np.trim_zeros(answer["DOUBLE"][0]), request["SIGNAL"][0])


def test_rows_of_unequal_shape_within_a_request_are_refused(client):
    uneven = signal(5, 3, rows=2)
    uneven["LENGTH"][1] = 4
    bad, good = client.infer_at_once("cut", [uneven, signal(7, 2)])
    assert isinstance(bad, InferenceServerException)
    assert "must have rows of one shape within a request, but has [(3,), (4,)]" in bad.message()
    assert good["CUT"].shape == (1, 2)


def test_a_scalar_output_is_refused_with_advice(client):
    (bad,) = client.infer_at_once("scalar", [signal(5, 3, rows=3)])
    assert isinstance(bad, InferenceServerException)
    assert "output 'CUT' of 'scalar' (number 0) must be float32 [-1]" in bad.message()
    assert "reshape a scalar to [1]" in bad.message()


def test_an_input_beyond_what_an_instance_may_allocate_is_refused_alone(client):
    # Of 64 MiB a third may be input: more in a row, in a request, in each part of it, and more than there is at all.
    for mib, rows in ((22, 1), (6, 4), (3, 32), (66, 1)):
        with pytest.raises(InferenceServerException, match="too little memory for an input of this length"):
            client.infer("bounded", SIGNAL=np.ones((rows, mib << 18), np.float32), LENGTH=np.ones((rows, 1), np.int32))
        answer = client.infer("bounded", SIGNAL=np.ones((1, 1 << 18), np.float32), LENGTH=np.ones((1, 1), np.int32))
        assert answer["CUT"].tolist() == [[1]]


def test_a_serialised_pipeline_is_served(client):
    request = signal(5, 3)
    np.testing.assert_array_equal(client.infer("bounded", **request)["CUT"], request["SIGNAL"][:, :3])


def test_a_large_file_of_no_known_format_is_refused_alone(client):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(400), 16_000, format="WAV")
    for mib in (40, 60):
        assert client.infer("heard", AUDIO=np.frombuffer(file.getvalue(), np.uint8)[None])["SIGNAL"].shape == (1, 400)
        with pytest.raises(InferenceServerException, match="too little memory for an input of this length"):
            client.infer("heard", AUDIO=np.zeros((1, mib << 20), np.uint8))


def features(frames: int, rows: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + frames).standard_normal((rows, 4, frames)).astype(np.float32)


def test_ragged_requests_run_as_one_batch_with_the_rows_they_have_unpadded(client):
    clips = [features(frames) for frames in (8, 5, 3, 1)]
    before = client.executions("ragged")
    together = client.infer_at_once("ragged", [{"FEATURES": clip} for clip in clips])
    assert client.executions("ragged") == before + 1
    for clip, answer in zip(clips, together, strict=True):
        assert answer["BATCH_ELEMENTS"].item() == sum(other.size for other in clips)
        assert answer["POSITION"].shape == (1, 8)  # padded to the longest of the batch, in each request
        np.testing.assert_allclose(answer["SUM"], clip.reshape(1, -1).sum(1, keepdims=True), atol=1e-5)
        unpadded = client.infer("ragged", FEATURES=np.repeat(clip, 4, 0))
        np.testing.assert_allclose(answer["SUM"], unpadded["SUM"][:1], atol=1e-5)  # float32 sums in another order


def test_a_batch_of_long_clips_runs_in_parts_on_a_cpu(client):
    clips = [features(14_000, seed=seed) for seed in range(4)]
    before = client.executions("ragged")
    answers = client.infer_at_once("ragged", [{"FEATURES": clip} for clip in clips])
    assert client.executions("ragged") == before + 1
    assert sorted(answer["BATCH_ELEMENTS"].item() for answer in answers) == [112_000] * 4
    for clip, answer in zip(clips, answers, strict=True):
        np.testing.assert_allclose(answer["SUM"], clip.reshape(1, -1).sum(1, keepdims=True), atol=0.1)


def test_the_rows_of_a_large_request_run_in_parts_on_a_cpu(client):
    rows = features(14_000, rows=5)
    answer = client.infer("ragged", FEATURES=rows)
    assert answer["BATCH_ELEMENTS"][:, 0].tolist() == [112_000] * 4 + [56_000]
    assert answer["POSITION"].shape == (5, 14_000)
    np.testing.assert_allclose(answer["SUM"], rows.sum((1, 2))[:, None], atol=0.1)


def test_rows_run_together_where_their_outputs_are_as_wide_as_the_batch_has_rows(client):
    answer = client.infer("square", FEATURES=np.ones((3, 4, 14_000), np.float32))
    np.testing.assert_array_equal(answer["SUMS"], np.full((3, 3), 168_000))


def test_a_request_of_several_rows_gets_its_rows_back(client):
    three, one = features(6, rows=3), features(9)
    first, second = client.infer_at_once("ragged", [{"FEATURES": three}, {"FEATURES": one}])
    np.testing.assert_allclose(first["SUM"], three.sum((1, 2))[:, None], atol=1e-5)
    np.testing.assert_allclose(second["SUM"], one.sum((1, 2))[:, None], atol=1e-5)


def test_only_the_outputs_that_are_asked_for_are_sent(client):
    assert set(client.infer("ragged", outputs=["SUM"], FEATURES=features(3, rows=4))) == {"SUM"}


def test_a_failing_request_fails_alone(client):
    indices = [{"INDEX": np.array([[index]], np.int32)} for index in (8, 99, 3)]
    before = client.executions("lookup")
    first, bad, last = client.infer_at_once("lookup", indices)
    assert client.executions("lookup") == before + 1
    assert first["VALUE"].item() == 80
    assert last["VALUE"].item() == 30
    assert isinstance(bad, InferenceServerException)
    assert "out of data bounds" in str(bad)
    assert bad.status() == "StatusCode.INTERNAL"  # as the native backend answers


def test_an_answer_with_fewer_rows_than_the_request_is_refused(client):
    with pytest.raises(InferenceServerException, match=r"row for each of the 3 rows of the batch, but .* is \[2, 1\]"):
        client.infer("lookup", INDEX=np.array([[8], [-1], [3]], np.int32))


def test_no_thread_of_an_instance_is_bound_to_a_core(tiny_server, stubs_of):
    """ONNX Runtime binds those that it counts itself, but not their caller, which then shares a core with one."""
    threads = stubs_of(tiny_server)["large_0_0"].threads()
    assert {frozenset(os.sched_getaffinity(thread.id)) for thread in threads} == {frozenset(os.sched_getaffinity(0))}


def test_an_instance_keeps_its_weights_once(tiny_server, stubs_of):
    """ONNX Runtime reads them, and packs them anew for its kernels."""
    held = {}
    for name, stub in stubs_of(tiny_server).items():
        status = Path(f"/proc/{stub.pid}/status").read_text()
        held[name] = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    assert held["large_0_0"] - held["lookup_0_0"] < 1.5 * 64


def test_metrics_are_served(tiny_server, client):
    client.infer("ragged", FEATURES=np.ones((4, 4, 3), np.float32))
    with urllib.request.urlopen(tiny_server.metrics_url, timeout=60) as answer:
        text = answer.read().decode()
    assert 'nv_inference_request_success{model="ragged",version="1"}' in text
