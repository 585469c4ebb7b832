"""Many clips: order, concurrency, and what fails among them."""

import contextvars
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from carnelian_client import CarnelianClient, InvalidAudio, Transcript


def test_many_keep_their_order_and_their_number(client, triton, wav, make_result):
    def slow_for_the_first(request, context):
        size = len(request.raw_input_contents[0])
        time.sleep(0.3 if size == len(wav) else 0)
        return make_result(f"{size} bytes")

    triton.answer = slow_for_the_first
    clips = [wav + bytes(i) for i in range(40)]
    outcomes = list(client.transcribe_many(clips, concurrency=4))
    assert [o.text for o in outcomes] == [f"{len(c)} bytes" for c in clips]
    assert len(triton.requests) == len(clips)
    assert triton.most_running <= 4


def test_many_go_to_the_model_and_have_the_time_that_the_call_says(client, triton, wav):
    assert len(list(client.transcribe_many([wav, wav], model="jasper", timeout_s=1000))) == 2
    for request in triton.requests:
        assert request.model_name == "jasper"
        assert request.parameters["timeout"].int64_param == pytest.approx(1e9, rel=0.05)


def test_as_many_requests_overlap_as_the_call_says(endpoint, triton, wav, make_result):
    all_there = threading.Barrier(8, timeout=30)

    def meet(request, context):
        all_there.wait()
        time.sleep(0.2)  # one too many would come meanwhile
        return make_result("met")

    triton.answer = meet
    with CarnelianClient(endpoint.url, timeout_s=60) as client:
        assert [o.text for o in client.transcribe_many([wav] * 16, concurrency=8)] == ["met"] * 16
    assert triton.most_running == 8


def test_ending_the_loop_early_drops_what_is_not_sent_and_ends_the_threads(
    client, triton, wav, make_result, wait_until
):
    has_ended = threading.Event()

    def keep_all_but_the_first(request, context):
        if request.raw_input_contents[0] != wav:
            has_ended.wait(timeout=30)
        return make_result("a b")

    def workers():
        return {thread for thread in threading.enumerate() if thread.name.startswith("carnelian_")}

    triton.answer = keep_all_but_the_first
    before = workers()
    outcomes = client.transcribe_many([wav] + [wav + bytes(2)] * 999, concurrency=2)
    next(outcomes)
    wait_until(lambda: len(triton.requests) == 3)
    outcomes.close()
    has_ended.set()
    wait_until(lambda: workers() <= before)
    assert len(triton.requests) == 3


def test_a_failing_clip_does_not_cost_the_others_theirs(client, wav, tmp_path):
    silent = (np.zeros(0, np.float32), 16000)
    counted = (np.zeros(16000, np.int64), 16000)
    halved, swapped = (np.zeros(9), 11025.5), (16000, np.zeros(9))
    clips = [wav, silent, tmp_path / "missing.wav", counted, halved, swapped, "a\0b.wav", "\ud800.wav", wav]
    outcomes = list(client.transcribe_many(clips))
    assert [type(outcome) for outcome in outcomes] == [
        *(Transcript, InvalidAudio, FileNotFoundError, InvalidAudio, InvalidAudio, InvalidAudio),
        *(OSError, OSError, Transcript),
    ]


def test_errors_that_are_kept_hold_no_clips(client, triton, wav):
    """They held what was sent for as long as they were kept, by the frames of their tracebacks."""
    triton.script = [("INVALID_ARGUMENT", "no")]
    (error,) = client.transcribe_many([wav])
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    assert len(causes) > 1
    assert [each.__traceback__ for each in causes] == [None] * len(causes)


def test_failures_can_be_raised_in_their_place(client, wav):
    outcomes = client.transcribe_many([wav, b"", wav], return_exceptions=False)
    assert next(outcomes).text
    with pytest.raises(InvalidAudio):
        next(outcomes)


def test_many_takes_clips_as_room_comes_free(client, wav):
    taken = []

    def clips():
        for i in range(1000):
            taken.append(i)
            yield wav

    outcomes = client.transcribe_many(clips(), concurrency=2)
    assert not taken
    next(outcomes)
    assert len(taken) <= 4
    outcomes.close()


def test_a_list_is_taken_from_although_an_outcome_is_due(client, triton, wav):
    """The server must not idle behind a loop that works long on each outcome."""
    outcomes = client.transcribe_many([wav] * 1000, concurrency=2)
    for num_taken in range(1, 6):
        next(outcomes)
        end = time.monotonic() + 30
        while len(triton.requests) < num_taken + 3:
            assert time.monotonic() < end, "the window is not filled again"
            time.sleep(0.01)
    outcomes.close()


def test_an_error_of_the_iterable_comes_after_the_outcomes_due(client, wav):
    def clips():
        yield wav
        yield wav
        raise LookupError("no more")

    outcomes = client.transcribe_many(clips())
    assert next(outcomes).text == next(outcomes).text
    with pytest.raises(LookupError, match="no more"):
        next(outcomes)


def test_many_refuses_what_is_no_clip_and_no_concurrency(client):
    with pytest.raises(TypeError, match="must be a path"):
        list(client.transcribe_many([None]))
    with pytest.raises(ValueError, match="`concurrency` must be at least 1"):
        client.transcribe_many([], concurrency=0)


@pytest.mark.parametrize("method", ["transcribe", "transcribe_many", "transcribe_long"])
def test_calls_keep_the_context_variables_of_their_caller(client, triton, clip, method):
    """Traces and logs of many clips, and of the pieces of a recording, belonged to no request."""
    job, seen = contextvars.ContextVar("job", default="none"), []
    heard = logging.Handler()
    heard.emit = lambda record: seen.append(job.get())
    logger = logging.getLogger("carnelian_client")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        for name in ("one", "two"):  # each with a retry, which is logged
            triton.script = [("UNAVAILABLE", "Socket closed")]
            job.set(name)
            outcomes = getattr(client, method)([clip] if method == "transcribe_many" else clip)
            list(outcomes if method == "transcribe_many" else [outcomes])
    finally:
        logger.removeHandler(heard)
        logger.setLevel(logging.NOTSET)
    assert seen == ["one", "two"]


def test_nothing_to_do_is_no_mistake(client):
    assert list(client.transcribe_many([])) == []


@pytest.mark.parametrize("clips", ["clip.wav", b"RIFF", Path("clip.wav")])
def test_one_clip_is_not_many(clips):
    with CarnelianClient() as client, pytest.raises(TypeError, match="must be an iterable of clips, but is one"):
        client.transcribe_many(clips)


def test_one_request_id_is_not_that_of_many():
    with CarnelianClient() as client, pytest.raises(TypeError, match="`request_id` must be a single clip's"):
        client.transcribe_many(["a.wav", "b.wav"], request_id="7")
