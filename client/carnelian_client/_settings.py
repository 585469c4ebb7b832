"""The settings of both clients, checked once, and the requests that are made with them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from os import PathLike

from ._audio import describe_audio, encode_audio
from ._errors import InvalidOption
from ._retry import Deadline, RetryPolicy
from ._types import Audio, DecodingOptions, Request

DEFAULT_URL = "localhost:8001"
DEFAULT_MODEL = "quartznet_demo"
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_CONCURRENCY = 8
TAKEN_AHEAD = 2
"""The clips that `transcribe_many` takes ahead of the outcomes, as a multiple of the concurrency: so a slow clip at the
front leaves work for the others."""

TRITONS_OWN = frozenset({"priority", "sequence_end", "sequence_id", "sequence_start", "timeout"})
"""Request parameters that Triton reads and hides from its models: `timeout=5` would be five microseconds."""

CLIENTS_OWN = frozenset({"api_key", "headers", "metadata", "retry", "tls", "url"})
"""What a client has for all its calls, and no call has for itself. gRPC's name for headers is metadata."""

OWN_ADDRESS = re.compile(
    r"unix(?:-abstract)?:.+|(?:[a-z0-9+.-]+:/{0,3})?(?:localhost|127\.[\d.]+|\[::1\]):\d+", re.IGNORECASE
)
"""The URLs of this machine itself: what is sent there passes no network."""

_TARGET = re.compile(r"(unix|unix-abstract|vsock|xds):.+|((dns|ipv4|ipv6)://[^/]*/)?[^/]+:(?P<port>\d+)", re.IGNORECASE)
_BARE_IPV6 = re.compile(r"[0-9a-f]*:[0-9a-f.]*:[0-9a-f:.]*", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[a-z0-9_.-]+(?<!-bin)")  # gRPC wants bytes for names in -bin
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a client; see `CarnelianClient` for their meaning."""

    url: str
    model: str
    timeout_s: float
    retry: RetryPolicy
    headers: Mapping[str, str] | None = field(repr=False)  # secrets do not belong in logs
    api_key: str | None = field(repr=False)

    def __post_init__(self) -> None:
        # gRPC would take other schemes for a name to resolve, and add port 443 where there is none.
        target = _TARGET.fullmatch(self.url)
        if target is None or _BARE_IPV6.fullmatch(self.url):
            raise ValueError(
                f"`url` must be the host:port of Triton's gRPC endpoint, but is {self.url!r}; "
                "write for example localhost:8001 or [::1]:8001, and turn encryption on with `tls`."
            )
        if target["port"] and not 0 < int(target["port"]) < 2**16:  # gRPC would take it modulo 65536
            raise ValueError(f"`url` must end in a port from 1 to 65535, but is {self.url!r}; Triton's is 8001.")
        if self.api_key == "":
            raise ValueError("`api_key` must be a key, but is empty; leave it out where there is none.")
        for name, value in self.metadata:
            if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
                shown = "`api_key`, sent as" if name == "authorization" and self.api_key is not None else "header"
                raise ValueError(
                    f"{shown} {name!r} must have a name of letters, digits, -, _ and ., not ending in -bin, and a "
                    "value of printable ASCII in one line; strip a key that was read from a file."
                )
        _check_text("model", self.model)
        self.deadline(None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers and API key as gRPC metadata, whose names must be in lower case."""
        headers = {name.lower(): value for name, value in (self.headers or {}).items()}
        if len(headers) < len(self.headers or {}):
            raise ValueError(
                f"`headers` must name each header once, in whatever case, but has {', '.join(self.headers or {})}."
            )
        if self.api_key is not None:
            if "authorization" in headers:
                raise ValueError("`api_key` is sent as the header authorization, which `headers` has; choose one.")
            headers["authorization"] = f"Bearer {self.api_key}"
        return tuple(headers.items())

    def choose_model(self, model: str | None) -> str:
        """Return the model of one call, by default the client's; raise ValueError if it is empty or cannot be sent."""
        chosen = self.model if model is None else model
        _check_text("model", chosen)
        return chosen

    def request(
        self, audio: Audio, model: str, request_id: str | None, options: DecodingOptions, deadline: Deadline
    ) -> Request:
        """Read and encode a clip, and make its request: may wait for the disk; raises what `encode_audio` raises."""
        request_id = uuid.uuid4().hex if request_id is None else request_id
        _check_text("request_id", request_id)
        parameters = {name: _parameter(name, value) for name, value in options.items()}
        encoded = encode_audio(audio, deadline)
        return Request(encoded, describe_audio(audio), model, request_id, parameters)

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a call that starts now, after `timeout_s` or else the client's time."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a str, but is {value!r:.80}.")
    if not value:
        raise ValueError(f"`{name}` must not be empty; leave it out for the default.")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a command line may be of any bytes
        raise ValueError(f"`{name}` must be text in UTF-8, but is {value!r:.80}.") from error


def _parameter(name: str, value: object) -> str | int:
    """Convert an option to a request parameter. Triton 2.51 only passes integers and strings; others become text."""
    if name in TRITONS_OWN:
        advice = "; the time for a call is `timeout_s`" if name == "timeout" else ""
        raise InvalidOption(f"an option must be one of the decoder's, but Triton keeps {name!r} for itself{advice}")
    if name in CLIENTS_OWN:
        argument = "headers" if name == "metadata" else name
        raise InvalidOption(
            f"an option must be one of the decoder's, but {name!r} is the client's, for all its calls; make another "
            f"client with `{argument}`"
        )
    try:
        (name + value if isinstance(value, str) else name).encode()
    except UnicodeEncodeError as error:  # a command line may be of any bytes
        raise InvalidOption(f"option {name!r} must be text in UTF-8, but is {value!r:.80}") from error
    if getattr(value, "shape", None) == ():  # a number of NumPy or PyTorch, whose kinds are not Python's
        value = getattr(value, "item", lambda: value)()
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else str(value)
    if isinstance(value, (Real, Decimal)):
        return repr(float(value))
    try:
        # The first clip of `transcribe_many` would use an iterator up; of a mapping, only the keys would be sent.
        if isinstance(value, (Iterator, Mapping)):
            raise TypeError
        return json.dumps(list(value))  # type: ignore[call-overload]
    except TypeError as error:
        advice = "; leave it out for the default" if value is None else ""
        raise InvalidOption(
            f"option {name!r} must be a number, a string, True or False, or a list of strings, but is "
            f"{value!r:.80}{advice}"
        ) from error


def check_many(clips: object, concurrency: int, options: DecodingOptions) -> None:
    """Refuse arguments of `transcribe_many` that cannot work.

    Raises:
        TypeError: `clips` is a single clip, or `options` has a `request_id`, which all clips would share.
        ValueError: `concurrency` is below 1.
    """
    if isinstance(clips, (str, PathLike, bytes, bytearray, memoryview)):
        raise TypeError(f"`clips` must be an iterable of clips, but is one: {type(clips).__name__}; use `transcribe`.")
    if "request_id" in options:
        raise TypeError("`request_id` must be a single clip's, but would be that of all; use `transcribe`.")
    if concurrency < 1:
        raise ValueError(f"`concurrency` must be at least 1, but is {concurrency}.")


def check_blocks(blocks: object, kinds: tuple[type, ...], options: DecodingOptions) -> None:
    """Refuse arguments of `transcribe_stream` that cannot work.

    Raises:
        TypeError: `blocks` is none of the `kinds` of iterables, or is a single block; or `options` has a `request_id`,
            which all requests would share.
    """
    is_one = hasattr(blocks, "dtype") or isinstance(blocks, (str, bytes, bytearray, memoryview, tuple))
    if is_one or not isinstance(blocks, kinds):
        raise TypeError(f"`blocks` must be an iterable of arrays of samples, but is {type(blocks).__name__}.")
    if "request_id" in options:
        raise TypeError("`request_id` must be a single clip's, but would be that of all requests; leave it out.")
