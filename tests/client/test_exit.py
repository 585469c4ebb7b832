"""Clients in programs that end with calls in flight, and in programs that fork."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

PROGRAM = """
    import sys
    from carnelian_client import CarnelianClient

    client = CarnelianClient(sys.argv[1], timeout_s=600)
    clip = bytes.fromhex(sys.argv[2])
    outcomes = client.transcribe_many([clip] + [clip + bytes(1)] * 19, concurrency=2)
    print(next(outcomes).text, flush=True)
    {then}
"""


@pytest.fixture
def held(make_result, wav):
    """Answers the clip `wav` at once, and any other only when the test has ended."""
    is_over = threading.Event()

    def answer(request, context):
        if request.raw_input_contents[0] == wav:
            return make_result("first")
        is_over.wait()
        return make_result("late")

    yield answer
    is_over.set()


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("next(outcomes)", -signal.SIGINT),
        ("raise SystemExit(3)", 3),
        ("pass", 0),
        ("import atexit; atexit.register(client.close)", 0),
    ],
    ids=["Ctrl-C", "exit", "end", "close at exit"],
)
def test_a_program_does_not_wait_for_calls_that_nobody_asks_for(endpoint, triton, wav, held, then, status):
    triton.answer = held
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM).format(then=then), endpoint.url, wav.hex()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "first\n"
            if status == -signal.SIGINT:
                program.send_signal(signal.SIGINT)
            assert program.wait(timeout=60) == status, program.stderr.read()
        finally:
            program.kill()


def test_a_client_is_closed_by_the_end_of_python():
    program = """
        from carnelian_client import CarnelianClient

        def hold():
            with CarnelianClient("localhost:1"):
                yield

        held = hold()
        next(held)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=False).returncode == 0


def test_only_a_client_without_calls_works_after_a_fork(endpoint):
    """In a forked process, is_ready() was False in every other one."""
    program = """
        import os
        import sys
        from carnelian_client import CarnelianClient

        client = CarnelianClient(sys.argv[1], timeout_s=60)

        def ask():
            try:
                print(client.is_ready(), flush=True)
            except RuntimeError as error:
                print(error, flush=True)

        for _ in range(2):
            if not (child := os.fork()):
                ask()
                os._exit(0)
            os.waitpid(child, 0)
            ask()
    """
    words = [sys.executable, "-c", textwrap.dedent(program), endpoint.url]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    unused, parent, used, parent_again = done.stdout.splitlines()
    assert (unused, parent, parent_again) == ("True", "True", "True")
    assert "forked later; close the client before the fork" in used


def test_a_call_at_the_end_of_python_ends(endpoint):
    """It waited for a thread that Python no longer runs, or Python refused to start one."""
    program = """
        import builtins
        import sys
        from carnelian_client import CarnelianClient

        class Owner:
            def __init__(self, client):
                self.client = client

            def __del__(self):
                print(self.client.is_ready(timeout_s=30), flush=True)

        builtins.owner = Owner(CarnelianClient(sys.argv[1]))
        print(builtins.owner.client.is_ready(), flush=True)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), endpoint.url]
    assert subprocess.check_output(words, text=True, timeout=60).split() == ["True", "True"]


@pytest.mark.parametrize("starts_threads", [True, False], ids=["threads", "no threads"])
def test_a_clip_is_transcribed_as_python_ends(endpoint, wav, starts_threads):
    """Where no thread starts, as in 3.12.0 and 3.12.1, gRPC's call failed, and its destructor waited for ever."""
    program = """
        import atexit
        import sys
        import threading
        from carnelian_client import CarnelianClient

        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        def end():
            if sys.argv[3] == "False":
                threading.Thread.start = refuse
            print(client.transcribe(bytes.fromhex(sys.argv[2])).text)
            client.close()
            print("closed", flush=True)

        client = CarnelianClient(sys.argv[1], timeout_s=60)
        atexit.register(end)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), endpoint.url, wav.hex(), str(starts_threads)]
    assert subprocess.check_output(words, text=True, timeout=60) == f"{len(wav)} bytes\nclosed\n"


def test_a_forked_program_leaves_the_block_of_a_client_that_was_called(endpoint, triton, wav, held):
    """Closing the client waited for a call of another thread, which was in the first process alone."""
    triton.answer = held
    program = """
        import os
        import sys
        import threading
        import time
        from carnelian_client import CarnelianClient

        threading.excepthook = lambda _: None  # Python needs the lock of the standard error at its end
        clip = bytes.fromhex(sys.argv[2]) + bytes(1)
        with CarnelianClient(sys.argv[1], timeout_s=600) as client:
            threading.Thread(target=client.transcribe, args=(clip,), daemon=True).start()
            while not client._transport._in_flight:
                time.sleep(0.01)
            if not (child := os.fork()):
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), endpoint.url, wav.hex()]
    assert subprocess.check_output(words, text=True, timeout=60).split() == ["3"]
