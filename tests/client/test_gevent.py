"""What the README says of gevent: other greenlets run while a call waits."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    from gevent import monkey

    monkey.patch_all()
    import grpc.experimental.gevent

    grpc.experimental.gevent.init_gevent()
    import socket
    import sys

    import gevent
    from carnelian_client import CarnelianClient, DeadlineExceeded

    num_ticks = 0

    def tick():
        global num_ticks
        while True:
            num_ticks += 1
            gevent.sleep(0.01)

    clip = bytes.fromhex(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = CarnelianClient(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=1)
        calls = [lambda: client.transcribe(clip), lambda: next(client.transcribe_many([clip], return_exceptions=False))]
        gevent.spawn(tick)
        for call in calls:
            num_ticks = 0
            try:
                call()
            except DeadlineExceeded:
                print(num_ticks, flush=True)
"""


def test_other_greenlets_run_while_a_call_waits(wav):
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), wav.hex()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    one, many = map(int, done.stdout.split())  # 0 or 1 where greenlets stand still, else almost 100
    assert one > 5
    assert many > 5
