import collections
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from carnelian_serving.backends.dali.core import list_threads
from carnelian_serving.backends.dali.pipeline import PipelineRunner
from nvidia.dali import fn, pipeline_def, types
from tritonclient.utils import InferenceServerException


def signal(samples: int, length: int, rows: int = 1) -> dict[str, np.ndarray]:
    values = np.random.default_rng(samples).standard_normal((rows, samples)).astype(np.float32)
    return {"SIGNAL": values, "LENGTH": np.full((rows, 1), length, np.int32)}


def test_requests_of_different_lengths_run_as_one_batch(client: Any) -> None:
    requests = [signal(5, 3), signal(7, 2), signal(6, 6)]
    before = client.executions("cut")
    answers = client.infer_together("cut", requests)
    assert client.executions("cut") == before + 1
    for request, answer in zip(requests, answers, strict=True):
        length = request["LENGTH"].item()
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :length])
        np.testing.assert_array_equal(answer["DOUBLE"], request["SIGNAL"] * 2)


@pytest.mark.parametrize(("model", "together"), [("padded", 4), ("padded_by_five_threads", 5)])
def test_four_requests_run_at_a_time_on_a_cpu_or_one_on_each_thread(client: Any, model: str, together: int) -> None:
    requests = [signal(samples, 1) for samples in range(1, 7)]
    before = client.executions(model)
    answers = client.infer_together(model, requests)
    assert client.executions(model) == before + 1
    widths = collections.Counter(answer["DOUBLE"].shape[1] for answer in answers)  # of the longest that ran beside
    assert sorted(widths.values()) == [6 - together, together]
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :1])
        np.testing.assert_array_equal(np.trim_zeros(answer["DOUBLE"][0]), request["SIGNAL"][0])


def test_the_rows_of_a_request_run_together(client: Any) -> None:
    large, small = client.infer_together("padded", [signal(5, 2, rows=5), signal(7, 2)])
    assert large["DOUBLE"].shape == (5, 5)
    assert small["DOUBLE"].shape == (1, 7)


def test_rows_of_a_request_come_back_in_order(client: Any) -> None:
    request = signal(5, 4, rows=3)
    np.testing.assert_array_equal(client.infer("cut", **request)["CUT"], request["SIGNAL"][:, :4])


def test_a_request_without_samples_passes(client: Any) -> None:
    empty, full = client.infer_together("cut", [signal(0, 0), signal(4, 2)])
    assert empty["DOUBLE"].shape == (1, 0)
    assert full["DOUBLE"].shape == (1, 4)


def test_a_dali_error_is_answered_alone_and_the_pipeline_lives_on(client: Any) -> None:
    requests = [signal(5, 3), signal(6, 9), signal(7, 2)]
    before = client.executions("cut")
    first, bad, last = client.infer_together("cut", requests)
    assert client.executions("cut") == before + 1
    np.testing.assert_array_equal(first["CUT"], requests[0]["SIGNAL"][:, :3])
    np.testing.assert_array_equal(last["CUT"], requests[2]["SIGNAL"][:, :2])
    assert isinstance(bad, InferenceServerException)
    assert "DALI operator nvidia.dali.fn.slice: Slice can't be placed out of bounds" in bad.message()
    assert "dali.py" not in bad.message()  # no paths of the server
    assert bad.status() == "StatusCode.UNKNOWN"  # as the native backend answers
    np.testing.assert_array_equal(client.infer("cut", **requests[0])["CUT"], first["CUT"])


@pytest.mark.parametrize("place", [0, 4])
def test_an_error_in_one_part_of_a_batch_is_answered_alone(client: Any, place: int) -> None:
    requests = [signal(samples, 1) for samples in range(1, 7)]
    requests[place]["LENGTH"][:] = 9
    before = client.executions("padded")
    answers = client.infer_together("padded", requests)
    assert client.executions("padded") == before + 1
    assert isinstance(answers.pop(place), InferenceServerException)
    for request, answer in zip(requests[:place] + requests[place + 1 :], answers, strict=True):
        np.testing.assert_array_equal(answer["CUT"], request["SIGNAL"][:, :1])
        np.testing.assert_array_equal(np.trim_zeros(answer["DOUBLE"][0]), request["SIGNAL"][0])


def test_an_error_of_cplusplus_costs_the_next_batch_nothing() -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def decode() -> tuple[Any, ...]:
        file = fn.external_source(name="FILE", dtype=types.UINT8, ndim=1)
        return tuple(fn.decoders.audio(file, downmix=True, dtype=types.FLOAT))

    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((800, 2)), 16_000, format="FLAC")
    file = np.frombuffer(stream.getvalue(), np.uint8)
    endless = file.copy()  # as many samples as no vector can hold
    endless[21] &= 0xF0
    endless[22:26] = 0
    runner = PipelineRunner(decode().serialize(), max_batch_size=1, num_threads=1, device_id=None)
    with pytest.raises(RuntimeError, match=r"^DALI operator nvidia\.dali\.fn\.decoders\.audio: vector::"):
        runner.run({"FILE": [endless]})
    assert runner.run({"FILE": [file]})[0][0].shape == (800,)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_only_a_single_thread_is_kept_on_its_callers_core(num_threads: int) -> None:
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def take() -> tuple[Any, ...]:
        signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
        return (fn.slice(signal, start=0, shape=2, axes=[0]),)

    def cores_of_new_threads() -> list[set[int]]:
        names = {thread: Path(f"/proc/self/task/{thread}/comm").read_text() for thread in list_threads() - before}
        return [os.sched_getaffinity(thread) for thread, name in names.items() if "DALI" in name]

    allowed, before = os.sched_getaffinity(0), list_threads()
    runner = PipelineRunner(take().serialize(), max_batch_size=1, num_threads=num_threads, device_id=None)
    for _ in range(2):  # the second time with threads that are new after an error
        runner.run({"SIGNAL": [np.ones(3, np.float32)]})
        cores = cores_of_new_threads()
        assert cores
        assert all(len(found) == 1 if num_threads == 1 else found == allowed for found in cores)
        assert os.sched_getaffinity(0) == allowed
        with pytest.raises(RuntimeError, match="out of bounds"):
            runner.run({"SIGNAL": [np.ones(1, np.float32)]})
        assert os.sched_getaffinity(0) == allowed


def test_rows_of_unequal_shape_within_a_request_are_refused(client: Any) -> None:
    uneven = signal(5, 3, rows=2)
    uneven["LENGTH"][1] = 4
    bad, good = client.infer_together("cut", [uneven, signal(7, 2)])
    assert isinstance(bad, InferenceServerException)
    assert "must have rows of one shape within a request, but has [(3,), (4,)]" in bad.message()
    assert good["CUT"].shape == (1, 2)


def test_a_scalar_output_is_refused_with_advice(client: Any) -> None:
    (bad,) = client.infer_together("scalar", [signal(5, 3)])
    assert isinstance(bad, InferenceServerException)
    assert "output 'CUT' of 'scalar' (number 0) must be float32 [-1]" in bad.message()
    assert "reshape a scalar to [1]" in bad.message()


def test_an_input_beyond_what_an_instance_may_allocate_is_refused_alone(client: Any) -> None:
    # Of 64 MiB a third may be input: more in a row, in a request, in each part of it, and more than there is at all.
    for mib, rows in ((22, 1), (6, 4), (3, 32), (66, 1)):
        with pytest.raises(InferenceServerException, match="too little memory for an input of this length"):
            client.infer("bounded", SIGNAL=np.ones((rows, mib << 18), np.float32), LENGTH=np.ones((rows, 1), np.int32))
        answer = client.infer("bounded", SIGNAL=np.ones((1, 1 << 18), np.float32), LENGTH=np.ones((1, 1), np.int32))
        assert answer["CUT"].tolist() == [[1]]


def test_a_large_file_of_no_known_format_is_refused_alone(client: Any) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(400), 16_000, format="WAV")
    for mib in (40, 60):
        assert client.infer("heard", AUDIO=np.frombuffer(file.getvalue(), np.uint8)[None])["SIGNAL"].shape == (1, 400)
        with pytest.raises(InferenceServerException, match="too little memory for an input of this length"):
            client.infer("heard", AUDIO=np.zeros((1, mib << 20), np.uint8))
