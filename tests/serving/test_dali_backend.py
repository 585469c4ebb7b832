import io
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from carnelian_serving.backends.dali.core import list_threads
from carnelian_serving.backends.dali.pipeline import PipelineRunner
from nvidia.dali import fn, pipeline_def, types


def test_an_error_of_cplusplus_costs_the_next_batch_nothing():
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def decode():
        file = fn.external_source(name="FILE", dtype=types.UINT8, ndim=1)
        return tuple(fn.decoders.audio(file, downmix=True, dtype=types.FLOAT))

    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((800, 2)), 16_000, format="FLAC")
    file = np.frombuffer(stream.getvalue(), np.uint8)
    endless = file.copy()  # as many samples as no vector can hold
    endless[21] &= 0xF0
    endless[22:26] = 0
    allowed = os.sched_getaffinity(0)
    runner = PipelineRunner(decode().serialize(), max_batch_size=1, num_threads=1, device_id=None)
    with pytest.raises(RuntimeError, match=r"^DALI operator nvidia\.dali\.fn\.decoders\.audio: vector::"):
        runner.run({"FILE": [endless]})
    assert runner.run({"FILE": [file]})[0][0].shape == (800,)
    assert os.sched_getaffinity(0) == allowed  # here too, or the tests after this one would begin on one core


@pytest.mark.parametrize("num_threads", [1, 2])
def test_only_a_single_thread_is_kept_on_its_callers_core(num_threads):
    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def take():
        signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
        return (fn.slice(signal, start=0, shape=2, axes=[0]),)

    def cores_of_new_threads():
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
