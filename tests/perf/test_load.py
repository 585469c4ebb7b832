import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from carnelian_perf.clips import cut_clips
from carnelian_perf.load import SETTLING_S, ask_clip, await_statistics, send_all, settle_statistics
from tritonclient import grpc

MANIFEST = Path(__file__).parents[2] / "demo/clips/manifest.jsonl"


def test_an_interrupt_ends_the_sending():
    sent = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored

    def send(index: int) -> None:
        sent.append(index)
        if index == 3:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        send_all(send, range(10_000), 2)
    signal.signal(signal.SIGINT, before)
    assert len(sent) < 10_000


def test_a_failure_ends_the_sending():
    """That of the second client, too: it is the first one's answers that are waited for."""
    sent, both_send = [], threading.Barrier(2, timeout=30)

    def send(index: int) -> None:
        if index < 2:
            both_send.wait()
        if threading.current_thread().name.endswith("_1"):
            raise ValueError("refused")
        sent.append(index)
        time.sleep(0.001)

    with pytest.raises(ValueError, match="refused"):
        send_all(send, range(2000), 2)
    assert len(sent) < 1999


@pytest.mark.usefixtures("late_counts")
def test_all_that_was_answered_is_counted(server):
    clips = cut_clips(MANIFEST, 1)
    stages = ["audio_decode", "quartznet_demo_ctc"]
    with grpc.InferenceServerClient(server.grpc_url) as client:
        before = settle_statistics(client, stages)
        for _ in range(3):
            ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))
        after = settle_statistics(client, stages)
        assert [after[stage].since(before[stage]).requests.count for stage in stages] == [3, 3]
        ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))
        assert await_statistics(client, stages[0], after[stages[0]]).since(after[stages[0]]).batches == {1: 1}


def test_counts_that_never_stand_still_are_taken_as_they_are(server):
    clips = cut_clips(MANIFEST, 1)
    is_over = threading.Event()
    with grpc.InferenceServerClient(server.grpc_url) as client, ThreadPoolExecutor() as pool:

        def send_on() -> None:
            while not is_over.is_set():
                ask_clip(client, "quartznet_demo", clips, 0, ("TRANSCRIPT",))

        others = pool.submit(send_on)
        started = time.monotonic()
        found = settle_statistics(client, ["audio_decode"])
        assert time.monotonic() - started < 10 * SETTLING_S
        is_over.set()
        others.result()
    assert found["audio_decode"].requests.count > 0
