import os
import signal
import time

import pytest
from carnelian_perf.load import send_all


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
