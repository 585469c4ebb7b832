import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from carnelian_perf.clips import cut_clips
from carnelian_perf.load import ask_clip
from carnelian_perf.stages import SETTLING_S, await_statistics, settle_statistics
from tritonclient import grpc

MANIFEST = Path(__file__).parents[2] / "demo/clips/manifest.jsonl"


@pytest.mark.usefixtures("late_counts")
def test_all_that_was_answered_is_counted(server):
    clips = cut_clips(MANIFEST, 1)
    stages = ["audio_decode", "quartznet_demo_ctc"]
    with grpc.InferenceServerClient(server.grpc_url) as client:
        before = settle_statistics(client, stages)
        for _ in range(3):
            ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))
        after = settle_statistics(client, stages)
        assert [after[stage].since(before[stage]).requests for stage in stages] == [3, 3]
        ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))
        assert await_statistics(client, stages[0], after[stages[0]]).since(after[stages[0]]).batches == {1: 1}


def test_counts_that_never_stand_still_are_taken_as_they_are(server):
    clips = cut_clips(MANIFEST, 1)
    is_over = threading.Event()
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor() as pool:

        def send_on():
            while not is_over.is_set():
                ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))

        others = pool.submit(send_on)
        started = time.monotonic()
        found = settle_statistics(client, ["audio_decode"])
        assert time.monotonic() - started < 10 * SETTLING_S
        is_over.set()
        others.result()
    assert found["audio_decode"].requests > 0
