"""When to try again, and how long to wait: one policy for the blocking and the asynchronous client."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._errors import CarnelianClientError, DeadlineExceeded

if TYPE_CHECKING:
    from tenacity import RetryCallState

DEFAULT_ATTEMPTS = 5
LONGEST_TIMEOUT_S = 1e9
"""Some thirty years; gRPC takes much longer ones for no time at all."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with equal jitter, for errors that are `retryable`, within the call's `timeout_s`.

    Before its n-th repetition a call waits for a random time between the half and the whole of
    `first_wait_s * 2**(n - 1)`, or of `longest_wait_s` if that is less. With the defaults, 5 attempts
    take at least 1.5 s and 20 take 38 s; the connection that the last of them finds may be a second older.
    Transcribing changes nothing on the server, so a repeated request does no harm.
    """

    num_attempts: int = DEFAULT_ATTEMPTS
    """The largest number of attempts; 1 never retries."""
    first_wait_s: float = 0.2
    """The longest wait before the second attempt, in seconds; it doubles with each further attempt."""
    longest_wait_s: float = 5.0
    """The longest wait before any attempt, in seconds."""

    def __post_init__(self) -> None:
        if self.num_attempts < 1:
            raise ValueError(f"`num_attempts` must be at least 1, but is {self.num_attempts}; 1 never retries.")
        if not 0 < self.first_wait_s <= self.longest_wait_s:
            raise ValueError(
                "`first_wait_s` must be above 0 and at most `longest_wait_s`, but they are "
                f"{self.first_wait_s} and {self.longest_wait_s}."
            )


ONCE = RetryPolicy(num_attempts=1)


class Deadline:
    """A point in time, so that every attempt of a call shares one `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise ValueError(f"`timeout_s` must be above 0 and at most {LONGEST_TIMEOUT_S:g}, but is {timeout_s}.")
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raise the error of a clip that is not read yet if the deadline has passed."""
        if self.is_over:
            raise self.error()

    def error(self, advice: str = "") -> DeadlineExceeded:
        """Return the error of a clip that was not read before the deadline."""
        return DeadlineExceeded(
            f"the clip was not read within {self.timeout_s:g} s; allow more (`timeout_s`, `--timeout`){advice}"
        )

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() > self._end

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; a millisecond once it has passed, for gRPC refuses a timeout of 0."""
        return max(self._end - time.monotonic(), 1e-3)


def retry_arguments(policy: RetryPolicy, deadline: Deadline) -> dict[str, Any]:
    """Return the arguments for `tenacity.Retrying` and `tenacity.AsyncRetrying`.

    The last error is raised as it is, when waiting would outlast the deadline too.
    """
    import tenacity

    half = {"multiplier": policy.first_wait_s / 2, "max": policy.longest_wait_s / 2}
    return {
        "stop": tenacity.stop_after_attempt(policy.num_attempts) | tenacity.stop_before_delay(deadline.left_s),
        "wait": tenacity.wait_exponential(**half) + tenacity.wait_random_exponential(**half),
        "retry": tenacity.retry_if_exception(lambda e: isinstance(e, CarnelianClientError) and e.retryable),
        "before_sleep": _log_retry,
        "reraise": True,
    }


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    # Not a warning: without any handler Python would print it, and the SDK never prints.
    _logger.info("attempt %d failed, again in %.2f s: %s", state.attempt_number, state.upcoming_sleep, error)
