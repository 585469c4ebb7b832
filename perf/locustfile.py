"""Users who send clips of mixed length through the SDK: `locust -f perf/locustfile.py --host localhost:8001`.

The clips are those of `carnelian-perf mixed`: log-normal durations, cut from the demo's clips or taken from a manifest.
Each user sends one, waits for the answer, pauses, sends the next. `--pause 0` is the closed loop of `mixed`.
"""

import logging
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent

grpc_gevent.init_gevent()  # before a channel is made: gRPC's threads would block all users

from carnelian_client import CarnelianClient, CarnelianClientError, RetryPolicy  # noqa: E402
from carnelian_perf.clips import WavClip, cut_clips, load_clips  # noqa: E402
from locust import User, events, task  # noqa: E402
from locust.exception import StopUser  # noqa: E402

DEMO_MANIFEST = Path(__file__).parents[1] / "demo/clips/manifest.jsonl"
LENGTHS_S = (4, 8, 16, 60)
LOGGER = logging.getLogger("carnelian_perf")


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Add options to Locust's own; its web page offers those that can change from one test to the next."""
    parser.add_argument("--model", default="quartznet_demo", help="Name of the model.")
    parser.add_argument(
        "--manifest", default="", help="Clips to send whole; without, the demo's, cut.", include_in_web_ui=False
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="Mean seconds between an answer and the next clip; none by default."
    )


class Totals:
    """What all users of this process share: the clips, and the audio that was answered since the test began."""

    audio_s = 0.0
    began = 0.0
    clips: list[WavClip] = []  # noqa: RUF012  one list for all users


@events.init.add_listener
def make_clips(environment: Any, **_: Any) -> None:
    """Make the clips and check the options, once, before the time of the test begins."""
    manifest = environment.parsed_options.manifest
    try:
        Totals.clips = load_clips(Path(manifest)) if manifest else cut_clips(DEMO_MANIFEST)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"--manifest: {error}")  # on another exception, Locust shows a traceback and goes on without clips
    if not 0 <= (pause := environment.parsed_options.pause) < math.inf:
        sys.exit(f"--pause must be seconds, 0 or more, but is {pause}")
    if environment.host:
        try:
            CarnelianClient(_endpoint(environment.host)).close()
        except ValueError as error:
            sys.exit(f"--host: {error}")
    gevent.get_hub().loop.update_now()  # otherwise `--run-time` counts from gevent's last look at the clock


@events.test_start.add_listener
def start(**_: Any) -> None:
    """Reset the totals when a test starts."""
    Totals.audio_s, Totals.began = 0.0, time.perf_counter()


@events.test_stop.add_listener
def stop(**_: Any) -> None:
    """Log the seconds of audio that were answered, which Locust's table of requests does not show."""
    rate = Totals.audio_s / (time.perf_counter() - Totals.began)
    LOGGER.info("%.0f s of audio answered, %.1f audio seconds per second", Totals.audio_s, rate)


class Speaker(User):  # type: ignore[misc]
    """A user who sends clips one after the other."""

    host = "localhost:8001"
    _client: CarnelianClient | None = None

    def wait_time(self) -> float:
        """Draw the pause before the next clip, in seconds: exponentially distributed, with the mean `--pause`."""
        pause: float = self.environment.parsed_options.pause
        return random.expovariate(1 / pause) if 0 < pause < math.inf else 0.0  # the web page takes any number

    def on_start(self) -> None:
        """Open this user's own connection."""
        options = self.environment.parsed_options
        try:
            self._client = CarnelianClient(_endpoint(self.host), model=options.model, retry=RetryPolicy(num_attempts=1))
        except ValueError as error:  # a wrong host from the web page, which shows failed requests
            self._report("no connection", error)
            raise StopUser from error

    def on_stop(self) -> None:
        """Close the user's connection: a process whose channels stay open does not end."""
        if self._client is not None:
            self._client.close()

    @task
    def send(self) -> None:
        """Send a clip; Locust's tables have a row for each range of lengths."""
        clip = random.choice(Totals.clips)
        longest = next((length for length in LENGTHS_S if clip.duration_s <= length), LENGTHS_S[-1])
        assert self._client is not None
        text, failure = "", None
        began = time.perf_counter()
        try:
            text = self._client.transcribe(clip.wav).text
            Totals.audio_s += clip.duration_s
        except CarnelianClientError as error:
            failure = error
        self._report(f"up to {longest} s", failure, 1e3 * (time.perf_counter() - began), len(text))

    def _report(
        self, name: str, failure: Exception | None, response_time: float = 0.0, response_length: int = 0
    ) -> None:
        self.environment.events.request.fire(
            request_type="clip",
            name=name,
            response_time=response_time,
            response_length=response_length,
            exception=failure,
        )


def _endpoint(host: str) -> str:
    """Reduce a host to host:port: Locust's own examples write it as a URL."""
    return host.removeprefix("http://").rstrip("/")
