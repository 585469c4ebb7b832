"""Refuses requests while too many wait for the stages after this one.

Triton bounds a queue by a policy, but with one it fetches no request ahead, and one that finds every instance
busy may sleep for half a second beside an idle one (2.51). So the stages of an ensemble have none, and the first
that they all share refuses what would only make everybody wait.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.parse
from collections.abc import Sequence

import triton_python_backend_utils as pb_utils

from carnelian_serving import METRICS_VARIABLE
from carnelian_serving.backends.counter import Counter
from carnelian_serving.backends.model_config import ConfigError, ModelConfig

REFUSED_METRIC = "carnelian_refused_requests_total"
LIMIT, STAGES = "max_pending_requests", "pending_models"
PARAMETERS = (LIMIT, STAGES)

_TIMEOUT_S = 1.0
"""How long to wait for the metrics, which usually come in milliseconds."""
_PAUSE_S = 2.0
"""How long not to ask for the metrics again after they did not come in time."""


def read_admission(config: ModelConfig) -> Admission | None:
    """Read a model's limit from its parameters; None if it has none.

    Raises:
        ConfigError: The limit or the stages are given without the other, or the limit is below 1.
    """
    if not set(PARAMETERS) & set(config.parameters):
        return None
    if not set(PARAMETERS) <= set(config.parameters):
        raise ConfigError(f"{config.name!r} must have both `{LIMIT}` and `{STAGES}` as parameters, or neither")
    limit = config.integer(LIMIT)
    if limit < 1:
        raise ConfigError(f"`{LIMIT}` of {config.name!r} must be at least 1, but is {limit}")
    stages = [stage.strip() for stage in config.parameters[STAGES].split(",")]
    return Admission(config.name, stages, limit)


class Admission:
    """Decides whether requests of one instance of a model may pass on to the stages after it.

    If Triton is too slow to say how many requests wait, it is overloaded, and none pass.
    """

    def __init__(self, model: str, stages: Sequence[str], limit: int) -> None:
        """Let requests pass while fewer than `limit` wait for `stages`."""
        self._model = model
        self._stages = stages
        self._limit = limit
        self._pending = _PendingRequests(stages, os.environ.get(METRICS_VARIABLE))
        self._most_pending = 0
        """The most requests that may wait now: those of when Triton was last asked, and all that passed since."""
        self._refused = Counter(REFUSED_METRIC, "Requests that were turned away because too many waited.", model=model)

    def admit(self, num_requests: int) -> bool:
        """Return whether a batch of this many requests may pass; if so, they count as waiting from now on."""
        if self._most_pending >= self._limit and (counted := self._pending.count()) is not None:
            self._most_pending = counted
        if self._most_pending >= self._limit:
            self._refused.count(num_requests)
            return False
        self._most_pending += num_requests
        return True

    def refuse(self) -> pb_utils.InferenceResponse:
        """Make the answer to a request that does not pass: UNAVAILABLE, as of a full queue."""
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(
                f"Exceeds maximum queue size: {self._limit} requests may wait already for {' and '.join(self._stages)} "
                f"(`{LIMIT}` of {self._model!r}); send it again later, or fewer at a time",
                pb_utils.TritonError.UNAVAILABLE,
            )
        )


class _PendingRequests:
    """The queues of some models, as Triton's own metrics report them."""

    def __init__(self, models: Sequence[str], url: str | None) -> None:
        names = "|".join(map(re.escape, models))
        self._pattern = re.compile(rf'^nv_inference_pending_request_count{{.*model="(?:{names})".*}} (\d+)', re.M)
        self._url = urllib.parse.urlsplit(url or "")
        if not self._url.hostname:
            pb_utils.Logger.log_warn("no request is turned away: the server keeps no metrics")
        self._ask_from = 0.0

    def count(self) -> int | None:
        """Return the sum of the queues' lengths; 0 if the server keeps no metrics, or has no such models.

        None for a while after they did not come in time: to ask is to stand still.
        """
        if not self._url.hostname:
            return 0
        if time.monotonic() < self._ask_from:
            return None
        connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", self._url.path)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"it answers {answer.status} {answer.reason}")
        except TimeoutError:
            pb_utils.Logger.log_warn(
                f"{self._url.geturl()} did not come within {_TIMEOUT_S:g} s: requests are turned away"
            )
            self._ask_from = time.monotonic() + _PAUSE_S
            return None
        except (OSError, http.client.HTTPException) as error:
            pb_utils.Logger.log_warn(f"{self._url.geturl()} cannot be read, so no request is turned away: {error}")
            return 0
        finally:
            connection.close()
        lengths = self._pattern.findall(text)
        if not lengths:
            pb_utils.Logger.log_warn(f"no request is turned away: the server has no model of `{STAGES}`")
        return sum(map(int, lengths))
