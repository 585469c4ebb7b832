import os
import signal
import threading
import time

import pytest
from carnelian_perf.load import send_all


def test_an_interrupt_ends_the_sending():
    sent = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored

    def send(index):
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

    def send(index):
        if index < 2:
            both_send.wait()
        if threading.current_thread().name.endswith("_1"):
            raise ValueError("refused")
        sent.append(index)
        time.sleep(0.001)

    with pytest.raises(ValueError, match="refused"):
        send_all(send, range(2000), 2)
    assert len(sent) < 1999
