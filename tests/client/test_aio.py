import asyncio
import contextlib
import gc
import inspect
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from carnelian_client import (
    AsyncCarnelianClient,
    CarnelianClient,
    ConnectError,
    DeadlineExceeded,
    Health,
    InvalidAudio,
    Model,
    RetryPolicy,
    ServerBusy,
    Transcript,
    TransportError,
)

BUSY = ("UNAVAILABLE", "in ensemble 'm', [request id: 1] Exceeds maximum queue size")


@pytest.fixture
def run(endpoint, retry):
    """Run a coroutine function with an open client."""

    def run(use, *, retry=retry, timeout_s=60):
        async def main():
            async with AsyncCarnelianClient(endpoint.url, retry=retry, timeout_s=timeout_s) as client:
                return await use(client)

        return asyncio.run(main())

    return run


async def asked(triton, *calls):
    """Waits until the server has as many requests as there are calls, or one of them has ended."""
    while len(triton.requests) < len(calls) and not any(call.done() for call in calls):
        await asyncio.sleep(0.01)


def public(kind):
    return {n: m for n, m in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}


def test_the_twin_has_the_same_names_and_arguments():
    blocking, awaited = public(CarnelianClient), public(AsyncCarnelianClient)
    assert blocking.keys() == awaited.keys()
    for name in ["__init__", *blocking]:
        one, other = (inspect.signature(getattr(k, name)) for k in (CarnelianClient, AsyncCarnelianClient))
        assert [(p.name, p.kind, p.default) for p in one.parameters.values()] == [
            (p.name, p.kind, p.default) for p in other.parameters.values()
        ]


def test_a_clip_becomes_a_transcript(run, triton, wav):
    transcript = run(lambda client: client.transcribe(wav, request_id="7", timeout_s=1000))
    assert isinstance(transcript, Transcript)
    assert (transcript.text, transcript.request_id) == (f"{len(wav)} bytes", "7")
    assert triton.requests[0].parameters["timeout"].int64_param == pytest.approx(1e9, rel=0.05)


def test_another_event_loop_needs_a_client_of_its_own(endpoint, wav):
    client = AsyncCarnelianClient(endpoint.url)
    asyncio.run(client.transcribe(wav))
    with pytest.raises(RuntimeError, match="belongs to the event loop of its first call, and this is another"):
        asyncio.run(client.transcribe(wav))


def test_a_busy_server_is_asked_again(run, triton, wav):
    triton.script = [BUSY] * 2
    assert run(lambda client: client.transcribe(wav)).text
    triton.script = [BUSY] * 9
    with pytest.raises(ServerBusy):
        run(lambda client: client.transcribe(wav))


def test_invalid_audio_is_not_retried(run, triton, wav):
    triton.script = [("INVALID_ARGUMENT", "in ensemble 'm', no samples")]
    with pytest.raises(InvalidAudio, match="no samples"):
        run(lambda client: client.transcribe(wav))
    assert len(triton.requests) == 1


def test_a_slow_answer_is_a_deadline_exceeded(run, triton, wav, late):
    triton.script = [late]
    with pytest.raises(DeadlineExceeded):
        run(lambda client: client.transcribe(wav, timeout_s=0.1))


def test_the_time_that_a_call_waits_for_a_thread_counts(run, wav):
    async def use(client):
        is_free = threading.Event()
        blocked = asyncio.get_running_loop().run_in_executor(None, is_free.wait, 60)
        with pytest.raises(DeadlineExceeded, match=r"not read within 0\.1 s; allow more .* executor free") as caught:
            await client.transcribe(wav, timeout_s=0.1, model="jasper")
        assert not blocked.done()
        is_free.set()
        assert (caught.value.clip, caught.value.model) == (f"{len(wav)} bytes", "jasper")
        await blocked

    def run_with_one_thread(client):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return use(client)

    run(run_with_one_thread)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_that_nobody_waits_for_ends_by_itself(run, triton, wav, caplog, is_late):
    """Triton can crash where it is cancelled; asyncio would log its error."""
    given_up, seen = threading.Event(), queue.SimpleQueue()

    def watch(request, context):
        given_up.wait(timeout=30)
        seen.put(context.is_active())
        context.abort(grpc.StatusCode.INTERNAL, "late")

    async def use(client):
        while not triton.requests:  # the time may be over before anything is sent
            task = asyncio.create_task(client.transcribe(wav, timeout_s=0.5 if is_late else 60))
            await asked(triton, task)
            if not is_late:
                task.cancel()
            with pytest.raises(DeadlineExceeded if is_late else asyncio.CancelledError):
                await task
        in_flight = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0.5)  # the server would hear of an end meanwhile
        given_up.set()
        assert await asyncio.to_thread(seen.get, timeout=30)
        await asyncio.wait(in_flight, timeout=60)

    triton.answer = watch
    gc.collect()
    caplog.clear()  # of what earlier tests left behind
    run(use)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_health_readiness_and_models(run):
    async def use(client):
        return (
            await client.health(),
            await client.is_ready(),
            await client.is_ready("other"),
            await client.models(),
        )

    health, is_ready, is_other_ready, models = run(use)
    assert health == Health(is_live=True, is_ready=False, server_version="2.51.0")
    assert (is_ready, is_other_ready) == (True, False)
    assert Model("other", "1", False, "LOADING", "") in models


def test_a_server_that_is_not_there_is_a_connect_error(wav, retry):
    async def main():
        async with AsyncCarnelianClient("127.0.0.1:1", retry=retry) as client:
            assert not await client.is_ready()
            await client.transcribe(wav)

    with pytest.raises(ConnectError):
        asyncio.run(main())


def test_a_server_that_is_stopping_is_not_ready(endpoint, start_endpoint, monkeypatch):
    def stop(self, request, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, "Server not ready")

    async def ask(url):
        async with AsyncCarnelianClient(url) as client:
            return await client.is_ready()

    monkeypatch.setattr(type(endpoint.triton), "ModelReady", stop)
    assert asyncio.run(ask(start_endpoint().url)) is False


def test_a_closed_client_says_so(endpoint, wav):
    async def main():
        client = AsyncCarnelianClient(endpoint.url)
        await client.close()
        await client.transcribe(wav)

    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(main())


def test_a_call_that_the_other_side_cancels_is_made_again(run, triton, wav):
    triton.script = [("CANCELLED", "CANCELLED")]
    run(lambda client: client.transcribe(wav))
    assert len(triton.requests) == 2


def test_closing_ends_calls_in_flight_and_cancels_no_task(run, triton, wav, late):
    async def use(client):
        task = asyncio.create_task(client.transcribe(wav))
        await asked(triton, task)
        await client.close()
        with pytest.raises(TransportError, match="closed"):
            await task

    triton.script = [late]
    run(use, timeout_s=60)


def test_closing_leaves_nothing_to_the_next_event_loop(run, triton, wav, late, caplog):
    async def give_up(client):
        calls = [asyncio.create_task(client.transcribe(wav)) for _ in range(8)]
        await asked(triton, *calls)
        assert all(call.cancel() for call in calls)
        await asyncio.wait(calls)
        assert len(asyncio.all_tasks()) > 1  # a call that nobody waits for ends by itself
        await client.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    triton.script = 8 * [late]
    run(give_up)
    run(lambda client: client.transcribe(wav))
    assert not caplog.records


def test_closing_ends_calls_between_two_attempts(run, triton, wav):
    async def use(client):
        task = asyncio.create_task(client.transcribe(wav))
        await asked(triton, task)
        await asyncio.sleep(0.2)  # the answer comes, and the wait begins
        await client.close()
        with pytest.raises(TransportError, match="closed"):
            await asyncio.wait_for(task, 60)

    triton.answer = lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, BUSY[1])
    run(use, retry=RetryPolicy(num_attempts=1000, first_wait_s=1e5, longest_wait_s=1e5), timeout_s=1e6)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, a task does not say that it was cancelled")
def test_a_cancelled_task_stays_cancelled_when_the_client_is_closed(run, triton, wav, late):
    async def use(client):
        task = asyncio.create_task(client.transcribe(wav))
        await asked(triton, task)
        task.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    triton.script = [late]
    run(use, timeout_s=60)


async def listed(outcomes):
    return [outcome async for outcome in outcomes]


def test_many_go_to_the_model_and_have_the_time_that_the_call_says(run, triton, wav):
    run(lambda client: listed(client.transcribe_many([wav, wav], model="jasper", timeout_s=1000)))
    for request in triton.requests:
        assert request.model_name == "jasper"
        assert request.parameters["timeout"].int64_param == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize("is_async", [False, True])
def test_many_keep_their_order_and_lose_nothing(run, triton, wav, make_result, tmp_path, is_async):
    all_there = threading.Barrier(4, timeout=30)

    def slow_for_the_first(request, context):
        size = len(request.raw_input_contents[0])
        if size < len(wav) + 4:
            all_there.wait()
            time.sleep(0.4 if size == len(wav) else 0.2)  # one too many would come meanwhile
        return make_result(f"{size} bytes")

    good = [wav + bytes(i) for i in range(20)]
    clips = [*good, (np.zeros(9), 11025.5), tmp_path / "missing.wav", wav + bytes(20)]

    async def walked():
        for clip in clips:
            yield clip

    triton.answer = slow_for_the_first
    source = walked() if is_async else clips
    outcomes = run(lambda client: listed(client.transcribe_many(source, concurrency=4)))
    assert [o.text for o in outcomes[:-3]] == [f"{len(c)} bytes" for c in good]
    assert isinstance(outcomes[-3], InvalidAudio)
    assert isinstance(outcomes[-2], FileNotFoundError)
    assert outcomes[-1].text == f"{len(wav) + 20} bytes"
    assert triton.most_running == 4


def test_failures_can_be_raised_in_their_place(run, wav):
    async def use(client):
        outcomes = client.transcribe_many([wav, b"", wav], return_exceptions=False)
        assert (await anext(outcomes)).text
        with pytest.raises(InvalidAudio):
            await anext(outcomes)

    run(use)


def test_ending_the_loop_early_drops_what_is_not_sent(run, triton, wav, make_result, wait_until):
    has_ended = threading.Event()

    def keep_all_but_the_first(request, context):
        if request.raw_input_contents[0] != wav:
            has_ended.wait(timeout=30)
        return make_result("a b")

    async def use(client):
        clips = [wav] + [wav + bytes(2)] * 999
        async with contextlib.aclosing(client.transcribe_many(clips, concurrency=2)) as outcomes:
            await anext(outcomes)
            await asyncio.to_thread(wait_until, lambda: len(triton.requests) == 3)
        has_ended.set()
        in_flight = asyncio.all_tasks() - {asyncio.current_task()}  # which ends by itself
        await asyncio.wait(in_flight, timeout=60)
        return asyncio.all_tasks() - {asyncio.current_task()}

    triton.answer = keep_all_but_the_first
    assert run(use) == set()
    assert len(triton.requests) == 3


def test_outcomes_do_not_wait_for_a_source_that_waits(run, wav):
    async def use(client):
        more = asyncio.Event()

        async def clips():
            yield wav
            await more.wait()
            yield wav

        async with contextlib.aclosing(client.transcribe_many(clips())) as outcomes:
            first = await asyncio.wait_for(anext(outcomes), 60)
            more.set()
            return [first, await anext(outcomes)]

    assert [outcome.text for outcome in run(use)] == [f"{len(wav)} bytes"] * 2


def test_many_takes_clips_as_room_comes_free(run, wav):
    taken = []

    async def clips():
        for i in range(1000):
            taken.append(i)
            yield wav

    async def use(client):
        async with contextlib.aclosing(client.transcribe_many(clips(), concurrency=2)) as outcomes:
            await anext(outcomes)
            await asyncio.sleep(0.1)
            assert len(taken) <= 4

    run(use)


def test_the_source_is_closed_with_the_loop(run, wav):
    closed = []

    async def clips():
        try:
            while True:
                yield wav
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def use(client):
        async with contextlib.aclosing(client.transcribe_many(clips(), concurrency=2)) as outcomes:
            await anext(outcomes)
            await asyncio.sleep(0.1)  # until the source is not asked
        assert closed

    run(use)


def test_an_error_of_the_iterable_comes_after_the_outcomes_due(run, wav):
    async def clips():
        yield wav
        raise LookupError("no more")

    async def use(client):
        outcomes = client.transcribe_many(clips())
        assert (await anext(outcomes)).text
        with pytest.raises(LookupError, match="no more"):
            await anext(outcomes)

    run(use)
