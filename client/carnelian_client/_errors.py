"""The errors of the SDK.

    CarnelianClientError
    ├── TransportError           no answer came from the server
    │   ├── ConnectError         it could not be reached                              (retried)
    │   └── DeadlineExceeded     `timeout_s` passed; also a built-in TimeoutError
    ├── ServerError              the server answered that it could not do it
    │   ├── ServerBusy           a queue, its memory or a proxy's limit is full       (retried)
    │   ├── ModelNotReady        the model is loading, restarting or being replaced   (retried)
    │   ├── ModelNotFound        no model of that name
    │   └── AccessDenied         a header or an API key is missing or wrong
    ├── InvalidOption            no such option, or not with this value; also a built-in ValueError
    └── InvalidAudio             this clip cannot be transcribed; sending it again is useless

A path that cannot be opened raises the built-in OSError, a mistake in the arguments ValueError or TypeError.
"""
# ruff: noqa: N818  (ServerBusy, InvalidAudio, ... name a state; "Error" behind each would say nothing more)

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import ClassVar, TypeVar

E = TypeVar("E", bound=Exception)


class CarnelianClientError(Exception):
    """Base of every error that the server, the network or a clip causes."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed a little later; `RetryPolicy` retries these."""

    def __init__(
        self,
        message: str,
        *,
        size_advice: str = "",
        clip: str | None = None,
        model: str | None = None,
        request_id: str | None = None,
        status: str | None = None,
    ) -> None:
        super().__init__(message)
        self._what = message
        self.size_advice = size_advice
        """The end of `message` if a clip is too large: what to do about it. Pieces of recordings need another."""
        self.clip = clip
        self.model = model
        self.request_id = request_id
        self.status = status
        """Name of the gRPC status, such as "UNAVAILABLE"; None if the error arose on this side."""

    @property
    def message(self) -> str:
        """What went wrong, and what to do."""
        return f"{self._what.rstrip('.')}; {self.size_advice}" if self.size_advice else self._what

    def __str__(self) -> str:
        where = f"{self.clip}: " if self.clip else ""
        facts = (("model", self.model), ("request", self.request_id), (None, self.status))
        context = ", ".join(f"{name} {value}" if name else value for name, value in facts if value)
        return f"{where}{self.message}" + (f" [{context}]" if context else "")


class TransportError(CarnelianClientError):
    """No answer came from the server."""


class ConnectError(TransportError):
    """The server could not be reached, or the connection broke."""

    retryable = True


class DeadlineExceeded(TransportError, TimeoutError):
    """The call, its retries included, took longer than `timeout_s`."""


class ServerError(CarnelianClientError):
    """The server answered with an error that is not known to be the clip's fault."""


class ServerBusy(ServerError):
    """The server refused the request because a queue or its memory is full, or a proxy because there were too many."""

    retryable = True


class ModelNotReady(ServerError):
    """The model is known but has no version that can answer now."""

    retryable = True


class ModelNotFound(ServerError):
    """The server has no model of that name."""


class AccessDenied(ServerError):
    """The server wants a header or an API key that was not sent, or not a right one."""


class InvalidOption(CarnelianClientError, ValueError):
    """The model has no such option, or it must not have this value; the message says what is allowed."""


class InvalidAudio(CarnelianClientError):
    """This clip cannot be transcribed: unreadable, empty, not finite, or too long."""


OF_ALL_CLIPS = (AccessDenied, InvalidOption, ModelNotFound)
"""What the next clip would fail with, too."""


def without_frames(error: E) -> E:
    """Return an error to keep, without its traceback and those of its causes: their frames hold what was sent."""
    held: list[BaseException | None] = [error]
    seen: set[int] = set()  # errors may form a circle
    while held:
        each = held.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            held += each.__cause__, each.__context__
    return error


@contextlib.contextmanager
def about(clip: str, model: str | None = None, request_id: str | None = None) -> Iterator[None]:
    """Name the clip and the call in each error that passes, a lack of memory too: what raises it need not know them."""
    try:
        yield
    except CarnelianClientError as error:
        error.clip, error.model, error.request_id = clip, model, request_id
        raise
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold what was read
        raise InvalidAudio(
            "memory must hold the file and what is decoded of it, but it ran out; allow more, send fewer clips at a "
            "time (`concurrency`, `--concurrency`), or cut the file into parts",
            clip=clip,
            model=model,
            request_id=request_id,
        ) from error


CUT_ADVICE = "`transcribe_long` (of the command, `--long`) cuts it in its pauses and joins the transcripts"
SHORTEN_ADVICE = "send a shorter clip, or a compressed form such as FLAC"
CONVERT_ADVICE = "convert the file, for example with `ffmpeg -i clip.m4a clip.flac`"
FORMAT_ADVICE = (
    "the server reads WAV, FLAC, Ogg Vorbis and Opus; "
    f"install soundfile (`pip install soundfile`) for MP3, AIFF, FLAC from a pipe and others, or {CONVERT_ADVICE}"
)
