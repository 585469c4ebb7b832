"""Which calls are made again, how often and for how long."""

import logging
import threading
import time

import pytest
import tenacity
from carnelian_client import (
    AccessDenied,
    CarnelianClient,
    CarnelianClientError,
    ConnectError,
    DeadlineExceeded,
    InvalidAudio,
    ModelNotFound,
    ModelNotReady,
    RetryPolicy,
    ServerBusy,
    ServerError,
)
from carnelian_client._answers import STATUS_ERRORS
from carnelian_client._retry import Deadline, retry_arguments
from carnelian_client._transport import _CHANNEL_OPTIONS

BUSY = ("UNAVAILABLE", "in ensemble 'm', [request id: 1] Exceeds maximum queue size")


def test_a_busy_server_is_asked_again_with_less_time(client, triton, wav):
    triton.script = [BUSY, ("NOT_FOUND", "Request for unknown model: 'm' has no available versions"), BUSY]
    assert client.transcribe(wav).text == f"{len(wav)} bytes"
    assert len({r.id for r in triton.requests}) == 1
    timeouts = [r.parameters["timeout"].int64_param for r in triton.requests]
    assert len(timeouts) == 4
    assert timeouts == sorted(timeouts, reverse=True)


@pytest.mark.parametrize(
    "words",
    [
        "Failed to increase the shared memory pool size for key '/dev/shm/carnelian_7'",
        "Unable to send response. Non-decoupled model cannot send more than one response.",
    ],
)
def test_shared_memory_that_is_full_is_waited_for(client, triton, wav, words, caplog):
    triton.script = [("INTERNAL", words)]
    with caplog.at_level(logging.INFO, "carnelian_client"):
        assert client.transcribe(wav).text == f"{len(wav)} bytes"
    assert "let it have 1 GiB, or send fewer clips at a time" in caplog.text


def test_what_a_request_is_called_does_not_say_what_happened_to_it(client, triton, wav):
    name = "x] exceeds maximum queue size"
    triton.script = [("INVALID_ARGUMENT", f"in ensemble 'm', [request id: {name}] expected 2 inputs but got 1 inputs")]
    with pytest.raises(ServerError, match="bytes: expected 2 inputs but got 1 inputs; ") as info:
        client.transcribe(wav, request_id=name)
    assert type(info.value) is ServerError


def test_a_call_that_the_other_side_cancels_is_made_again(client, triton, wav):
    triton.script = [("CANCELLED", "CANCELLED")]  # Triton 2.51 as it ends
    client.transcribe(wav)
    assert len(triton.requests) == 2


def test_the_last_error_is_raised_when_the_attempts_are_used_up(client, triton, wav, retry):
    triton.script = [BUSY] * 9
    with pytest.raises(ServerBusy, match="Exceeds maximum queue size"):
        client.transcribe(wav)
    assert len(triton.requests) == retry.num_attempts


def test_no_attempt_is_made_after_the_deadline(endpoint, triton, wav):
    triton.script = [BUSY] * 1000
    patient = RetryPolicy(num_attempts=1000, first_wait_s=0.1, longest_wait_s=0.1)
    late = pytest.raises((ServerBusy, DeadlineExceeded))  # the latter if an attempt is on its way at the deadline
    with CarnelianClient(endpoint.url, retry=patient) as client, late:
        client.transcribe(wav, timeout_s=1.0)
    assert len(triton.requests) < 50  # some 13, with 0.05 to 0.1 s before each


def test_no_wait_is_longer_than_the_longest():
    retrying = tenacity.Retrying(**retry_arguments(RetryPolicy(first_wait_s=1, longest_wait_s=2), Deadline(1000)))
    twentieth = tenacity.RetryCallState(retrying, None, (), {})
    twentieth.attempt_number = 20
    waits_s = [retrying.wait(twentieth) for _ in range(100)]
    assert 1 <= min(waits_s) < max(waits_s) <= 2


def test_a_call_is_retried_for_longer_than_grpc_waits_to_connect_again(monkeypatch):
    """Between its attempts gRPC fails every call with the last refusal; not all retries of a call may fall there."""
    connection_s = 1.2e-3 * dict(_CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"]  # gRPC varies it by a fifth
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    wait = tenacity.Retrying(**retry_arguments(RetryPolicy(), Deadline(1000))).wait
    state = tenacity.RetryCallState(None, None, (), {})
    for num_attempts, total_s, outlasted_s in ((5, 1.5, 0), (20, 38.1, 36)):  # the 36 s are in `--help`
        waits_s = []
        for state.attempt_number in range(1, num_attempts):
            waits_s.append(wait(state))
        assert sum(waits_s) == pytest.approx(total_s)
        assert total_s - connection_s > outlasted_s


@pytest.mark.parametrize(("wait_s", "is_last"), [(50, False), (70, True)])
def test_a_wait_that_would_outlast_the_deadline_is_not_begun(wait_s, is_last):
    retrying = tenacity.Retrying(**retry_arguments(RetryPolicy(), Deadline(60)))
    first = tenacity.RetryCallState(retrying, None, (), {})
    first.set_result(None)
    first.upcoming_sleep = wait_s
    assert retrying.stop(first) == is_last


def test_retries_are_logged_without_a_handler_of_ours(client, triton, wav, caplog):
    triton.script = [BUSY]
    with caplog.at_level(logging.INFO, "carnelian_client"):
        client.transcribe(wav)
    assert "attempt 1 failed" in caplog.text
    assert not logging.getLogger("carnelian_client").handlers


def test_a_slow_answer_is_a_deadline_exceeded(client, triton, wav, late):
    triton.answer = late
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s; allow more") as caught:
        client.transcribe(wav, timeout_s=0.5, request_id="7")
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.request_id == "7"
    assert len(triton.requests) <= 1  # none if the machine stood still before


def test_a_clock_that_is_set_forward_ends_no_call(client, triton, wav, make_result, monkeypatch):
    def answer(request, context):
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        time.sleep(0.5)  # gRPC looks at the clock every 0.1 s
        return make_result("a")

    triton.answer = answer
    assert client.transcribe(wav).text == "a"


@pytest.mark.parametrize("status", [s for s, kind in STATUS_ERRORS.items() if not kind.retryable])
def test_what_cannot_pass_is_not_retried(client, triton, wav, status):
    triton.script = [(status, "words")]
    with pytest.raises(CarnelianClientError, match=r"words|no answer within 60 s") as caught:
        client.transcribe(wav, request_id="7")
    assert type(caught.value) is STATUS_ERRORS[status]
    assert (caught.value.status, caught.value.request_id, caught.value.clip) == (
        status,
        "7",
        f"{len(wav)} bytes",
    )
    assert len(triton.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (("NOT_FOUND", "Request for unknown model: 'm' is not found"), ModelNotFound),
        (("INVALID_ARGUMENT", "in ensemble 'm', no samples"), InvalidAudio),
        (("UNAVAILABLE", "This protocol is restricted, expecting header 'k'"), AccessDenied),
        (("UNAVAILABLE", "in ensemble 'm', Request timeout expired"), DeadlineExceeded),
    ],
)
def test_useless_retries_are_not_made_whatever_the_status(client, triton, wav, answer, kind):
    triton.script = [answer]
    with pytest.raises(kind):
        client.transcribe(wav)
    assert len(triton.requests) == 1


def test_a_server_that_is_not_there_is_a_connect_error(wav, retry):
    with CarnelianClient("127.0.0.1:1", retry=retry) as client:
        with pytest.raises(ConnectError, match="check `url`"):
            client.transcribe(wav)
        assert not client.is_ready()
        with pytest.raises(ConnectError):
            client.health()


def test_a_server_that_comes_back_is_found_by_the_retries(start_endpoint, wav):
    endpoint = start_endpoint("127.0.0.3:0")  # where nobody else takes the port meanwhile
    with CarnelianClient(endpoint.url, retry=RetryPolicy(num_attempts=1000, longest_wait_s=0.2)) as client:
        client.transcribe(wav)
        endpoint.stop()
        starter = threading.Timer(0.5, start_endpoint, [endpoint.url])
        starter.start()
        assert client.transcribe(wav, timeout_s=60).text == f"{len(wav)} bytes"
        starter.join()


def test_model_not_ready_is_waited_for_and_then_raised(client, triton, wav, retry):
    triton.script = [("NOT_FOUND", "Request for unknown model: 'm' has no available versions")] * 9
    with pytest.raises(ModelNotReady, match=r"versions; .* starts or ends; try more often .*`--attempts`"):
        client.transcribe(wav)
    assert len(triton.requests) == retry.num_attempts
