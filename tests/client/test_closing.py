"""Calls that end because their client is closed or interrupted."""

import contextlib
import contextvars
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from carnelian_client import CarnelianClient, RetryPolicy, TransportError
from carnelian_client._threads import outside_main_thread


def test_a_closed_client_says_so(endpoint, wav):
    client = CarnelianClient(endpoint.url)
    client.close()
    for call in (client.health, client.models, client.is_ready, lambda: client.transcribe(wav)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_closing_ends_calls_in_flight(endpoint, triton, wav, make_result):
    client, ended = CarnelianClient(endpoint.url, timeout_s=60), threading.Event()

    def close(request, context):
        client.close()
        ended.wait(timeout=30)
        return make_result("late")

    triton.script = [close]
    with pytest.raises(TransportError, match="closed") as caught:
        client.transcribe(wav)
    assert not caught.value.retryable
    ended.set()


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_leaves_no_client_half_closed(endpoint, triton, wav, late, wait_until):
    triton.answer = late
    client = CarnelianClient(endpoint.url, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(client.transcribe, wav) for _ in range(2)]
        wait_until(lambda: len(client._transport._in_flight) == 2)
        is_first = iter([True])

        def interrupt(call):
            """As the first of two calls ends: `close` waits for the other one meanwhile."""
            if next(is_first, False):
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.2)

        for call in list(client._transport._in_flight):
            call.add_done_callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
        again = threading.Thread(target=client.close, daemon=True)
        again.start()
        again.join(timeout=20)
        assert not again.is_alive()
        assert all(isinstance(call.exception(), TransportError) for call in calls)


@pytest.mark.parametrize("ask", ["transcribe", "is_ready", "health", "models"])
def test_calls_go_through_grpc_where_no_handler_can_raise(client, wav, ask):
    """It left gRPC's locks locked: later calls had no answer, and `close` did not end."""
    threads = []

    class Metadata(tuple):
        def __iter__(self):
            threads.append(threading.current_thread())
            return super().__iter__()

    client._transport._metadata = Metadata([("key", "value")])
    getattr(client, ask)(*[wav] if ask == "transcribe" else [])
    assert threads
    assert threading.main_thread() not in threads


def test_calls_keep_the_context_of_the_thread_that_makes_them():
    """Instrumentation of gRPC finds its trace there."""
    trace = contextvars.ContextVar("trace")
    trace.set(7)
    assert outside_main_thread(trace.get) == 7


def test_a_handler_may_raise_wherever_a_call_takes_a_lock(client, wav, monkeypatch):
    """Python's own locks stay locked then: gRPC's thread waited for one of them, and later calls had no answer."""
    enter = threading.Condition.__enter__
    left = 0

    def interrupt(lock):
        nonlocal left
        is_taken = enter(lock)
        is_lost = sys._getframe(1).f_code.co_name == "__del__"  # Python prints what is raised there, and goes on
        if threading.get_ident() == threading.main_thread().ident and not is_lost:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return is_taken

    monkeypatch.setattr(threading.Condition, "__enter__", interrupt)
    for nth in itertools.count(1):
        left = nth
        try:
            client.transcribe(wav)
        except KeyboardInterrupt:
            assert client.transcribe(wav, timeout_s=20).text == f"{len(wav)} bytes"
        else:
            break
    assert nth > 1


def test_an_error_out_of_a_thread_holds_nothing_that_was_sent(wait_until):
    """It held itself, and the bytes of a request, until Python looked for such cycles."""

    class Request:
        pass

    def fail(request):
        raise ValueError

    request = Request()
    held = weakref.ref(request)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            outside_main_thread(functools.partial(fail, request))
        del request
        wait_until(lambda: held() is None)
    finally:
        gc.enable()


def test_closing_ends_calls_between_two_attempts(endpoint, triton, wav, late):
    retry = RetryPolicy(num_attempts=1000, first_wait_s=600, longest_wait_s=600)
    client = CarnelianClient(endpoint.url, timeout_s=6000, retry=retry)
    closer = threading.Timer(0.5, client.close)

    def refuse(request, context):
        closer.start()
        context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")

    triton.script, triton.answer = [refuse], late
    start = time.monotonic()
    with pytest.raises(TransportError, match="closed"):
        client.transcribe(wav)
    assert time.monotonic() - start < 60
    closer.join()


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "soundfile"])
def test_ctrl_c_is_heard_while_a_thread_reads(client, tmp_path, is_pipe):
    """Just before the main thread begins to wait, it does not wake it, as here, where another thread gets it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    is_over = threading.Event()
    was_heard = Future()

    def interrupt():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        was_heard.set_result(is_over.wait(30))

    def read_pipe():
        threading.Thread(target=feed, daemon=True).start()
        client.transcribe(pipe, timeout_s=60)

    def feed():
        with pipe.open("wb"):
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        read_pipe() if is_pipe else outside_main_thread(interrupt)
    is_over.set()
    assert was_heard.result()
