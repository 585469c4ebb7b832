"""gRPC client for Carnelian speech recognition.

    from carnelian_client import CarnelianClient

    with CarnelianClient("localhost:8001") as client:
        print(client.transcribe("clip.flac").text)

Import from here only; the modules beside this one are private.
"""

from ._aio import AsyncCarnelianClient
from ._client import CarnelianClient, Outcome
from ._errors import (
    AccessDenied,
    CarnelianClientError,
    ConnectError,
    DeadlineExceeded,
    InvalidAudio,
    InvalidOption,
    ModelNotFound,
    ModelNotReady,
    ServerBusy,
    ServerError,
    TransportError,
)
from ._retry import RetryPolicy
from ._types import TLS, Alternative, Audio, DecodingOptions, Health, Model, Transcript, Utterance, Word

__all__ = [
    "TLS",
    "AccessDenied",
    "Alternative",
    "AsyncCarnelianClient",
    "Audio",
    "CarnelianClient",
    "CarnelianClientError",
    "ConnectError",
    "DeadlineExceeded",
    "DecodingOptions",
    "Health",
    "InvalidAudio",
    "InvalidOption",
    "Model",
    "ModelNotFound",
    "ModelNotReady",
    "Outcome",
    "RetryPolicy",
    "ServerBusy",
    "ServerError",
    "Transcript",
    "TransportError",
    "Utterance",
    "Word",
]
