"""Turns the answers of Triton, of gRPC and of proxies into the errors of the SDK, with advice."""

from __future__ import annotations

import re
from typing import NamedTuple

from ._errors import (
    CONVERT_ADVICE,
    CUT_ADVICE,
    SHORTEN_ADVICE,
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
)

STATUS_ERRORS: dict[str, type[CarnelianClientError]] = {
    "CANCELLED": ConnectError,  # by the server, as it ends: the client itself cancels nothing that is still wanted
    "UNKNOWN": ServerError,
    "INVALID_ARGUMENT": ServerError,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "NOT_FOUND": ModelNotFound,
    "ALREADY_EXISTS": ServerError,
    "PERMISSION_DENIED": AccessDenied,
    "RESOURCE_EXHAUSTED": ServerBusy,
    "FAILED_PRECONDITION": ServerError,
    "ABORTED": ServerError,
    "OUT_OF_RANGE": ServerError,
    "UNIMPLEMENTED": ServerError,
    "INTERNAL": ServerError,
    "UNAVAILABLE": ConnectError,
    "DATA_LOSS": ServerError,
    "UNAUTHENTICATED": AccessDenied,
}
"""Every gRPC status but OK. Triton uses few of them for many things, so `_WORDINGS` come first."""
_OF_THE_REQUEST = (None, "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNKNOWN")
"""The statuses whose reason may be a clip or an option."""


MAX_ANSWER_BYTES = 16 << 20
"""The longest answer that is read, unpacked: a longer one could fill the memory. 100 readings of a minute, of 50
characters a second that take four bytes each, have a tenth of it."""


class _Wording(NamedTuple):
    pattern: str
    error: type[CarnelianClientError]
    advice: str = ""
    size_advice: str = ""


CERTIFICATE_ADVICE = (
    "in date, and of an authority that it trusts (`cert_path` and `key_path` of `tls`; `--cert`, `--key`)"
)

# The first match decides, where `_may_mean` lets it. Wordings were seen on Triton 2.51 and gRPC 1.8x.
_WORDINGS = (
    _Wording("^wrong option: ", InvalidOption),  # repeats what the caller wrote, whose words mean nothing here
    _Wording(
        "exceeds maximum queue size",
        ServerBusy,
        "send fewer clips at a time (`concurrency`), or try more often (`num_attempts`, `--attempts`)",
    ),
    _Wording("request timeout expired", DeadlineExceeded, "it waited too long in a queue of the server"),
    _Wording(
        "no answer within",
        DeadlineExceeded,
        "allow more (`timeout_s`, `--timeout`), or see if the server can be reached and is not overloaded",
    ),
    _Wording(
        "protocol is restricted",
        AccessDenied,
        "send the header it names: headers={'triton-grpc-protocol-...': key}",
    ),
    _Wording(
        "has no available versions|not at ready state|is stopping|server not ready|server exiting",
        ModelNotReady,
        "the server or the model starts or ends; try more often (`num_attempts`, `--attempts`), or see in the server's "
        "log whether it could be loaded",
    ),
    _Wording(
        "stub process .* is not healthy",
        ModelNotReady,
        "the model's process has ended or stands still; another server may answer, or this one once started anew",
    ),
    _Wording(
        "unknown model",
        ModelNotFound,
        "a server has the models that it has loaded, by default as it started; `models()` lists them, as does "
        "`curl -X POST HOST:8000/v2/repository/index`",
    ),
    _Wording(
        "unexpected inference (input|output)|data-type is|batch-size must|byte size mismatch|"
        "expected \\d+ inputs|unexpected shape",
        ServerError,
        "the model must take AUDIO and give TRANSCRIPT and RESULT, as the ensemble `<model>` does; "
        "its stages and `<model>_pcm` do not",
    ),
    _Wording(
        "http2 header with status: 413",
        ServerError,
        "a proxy before the server takes no request of this size, unless its limit is raised (nginx: "
        "`client_max_body_size`)",
        size_advice=SHORTEN_ADVICE,
    ),
    _Wording(
        "http2 header with status: 400",
        ServerError,
        "a proxy before the server refused the request; nginx does so where it wants a client certificate, "
        + CERTIFICATE_ADVICE,
    ),
    _Wording(
        "http2 header with status: 40[13]",
        AccessDenied,
        "a proxy before the server refuses the call: if it wants a key, there was none or a wrong one; see `api_key` "
        "(of the command, CARNELIAN_API_KEY) or `headers`",
    ),
    _Wording(
        "http2 header with status: 429",
        ServerBusy,
        "a proxy before the server limits the requests; send fewer clips at a time (`concurrency`), or try more often "
        "(`num_attempts`, `--attempts`)",
    ),
    _Wording(
        "http2 header with status: 50[23]",  # 503 is also what nginx answers beyond a limit, if not told otherwise
        ConnectError,
        "a proxy answers, but does not reach the server, or limits the requests",
    ),
    _Wording(
        "http2 header with status: 504",
        ConnectError,
        "a proxy does not reach the server, or waits for it for less time than `timeout_s`; let it wait longer (nginx: "
        "`grpc_read_timeout`, HAProxy: `timeout server`)",
    ),
    _Wording(
        "http2 header with status: 3",
        ServerError,
        "what answers sends callers elsewhere, as proxies do from port 80; use the port of its TLS in `url`, and `tls`",
    ),
    _Wording(
        "http2 header with status: (?!404)|data frame with end_stream",
        ServerError,
        "a proxy or a web server answered in the place of Triton; check `url`, that the proxy passes gRPC on (nginx: "
        "`grpc_pass`), and its log",
    ),
    _Wording(
        "goaway received; error code: 11; debug text: \\)",
        ServerError,
        "nginx does so if headers are too long (by default, over 8 KB); send shorter `headers` or a shorter key",
    ),
    _Wording("metadata size exceeds", ServerError, "send shorter `headers`, a shorter key, or a shorter `request_id`"),
    _Wording(
        "shared memory pool|cannot send more than one response",
        ServerBusy,
        "the server's /dev/shm is full: let it have 1 GiB, or send fewer clips at a time (`concurrency`)",
    ),
    _Wording(  # of gRPC on this side, which up to 1.60 does not say so
        rf"client: received message larger|^received message larger than max .* vs\. {MAX_ANSWER_BYTES}\)|"
        "decompressed message larger",
        ServerError,
        f"an answer must have at most {MAX_ANSWER_BYTES >> 20} MiB, which no transcript exceeds; is this a server of "
        "Carnelian?",
    ),
    _Wording("message larger than max", InvalidAudio, size_advice=SHORTEN_ADVICE),
    _Wording("too little memory for an input", InvalidAudio, size_advice=CUT_ADVICE),
    _Wording("no samples|empty audio", InvalidAudio),
    _Wording("not finite|non-finite", InvalidAudio),
    _Wording("^too long: ", InvalidAudio, size_advice=CUT_ADVICE),
    _Wording("too long|too short", InvalidAudio),
    _Wording("malformed 'fmt", InvalidAudio, f"the file is damaged, or of a codec that is not read; {CONVERT_ADVICE}"),
    _Wording("error decoding|malformed|chunk marker", InvalidAudio, "the file is damaged or cut short"),
    _Wording("flac decoder", InvalidAudio, f"the file is damaged, or FLAC within Ogg; {CONVERT_ADVICE}"),
    # Only what looks like WAV, FLAC or Ogg gets as far as to the server: the codec is one it does not read.
    _Wording(
        "encoded data|(unsupported|unimplemented|unknown) .{0,40}format|format not recogni[sz]ed",
        InvalidAudio,
        CONVERT_ADVICE,
    ),
    # TLS 1.3 hears of a refused client certificate after its handshake: as bytes that it cannot read, or as an end.
    _Wording(
        "unwrap failed|_alert_\\w{0,40}(certificate|unknown_ca|access_denied|handshake_failure)",
        ConnectError,
        f"the server refused this client: it must have a client certificate, {CERTIFICATE_ADVICE}",
    ),
    _Wording(
        "socket closed|connection reset|broken pipe|http1|parsing http/2",
        ConnectError,
        "the server ended, or wants `tls`, or `url` is not its gRPC port (usually 8001; 8000 speaks HTTP), "
        f"or it wants a client certificate, {CERTIFICATE_ADVICE}",
    ),
    _Wording(
        "rst_stream|goaway",
        ConnectError,
        "the server or a proxy gave up; HAProxy may do so if `proto h2` is missing from the line of its server",
    ),
    _Wording(
        "hostname verification",
        ConnectError,
        "the server's certificate does not name the host in `url`; use a name that it has, or add this one to it",
    ),
    _Wording(
        "certificate has expired|certificate is not yet valid",
        ConnectError,
        "the server's certificate is out of date, or the clock of this machine is wrong",
    ),
    _Wording("tls handshake|ssl_error", ConnectError, "check `tls`: both sides must use it, with a CA both trust"),
    _Wording("resolv", ConnectError, "check the host name in `url`"),
    _Wording(
        "http proxy returned",
        ConnectError,
        "the proxy of the environment refused; list the server in `no_proxy` to do without it",
    ),
    _Wording(
        "failed to connect|connection attempt timed out|handshaker shutdown|endpoint closing",
        ConnectError,
        # gRPC tells of the last address that it tried, which for localhost may not be the one where something answers.
        "check `url` (Triton's gRPC port, usually 8001; 8000 speaks HTTP), `tls`, and that the server runs",
    ),
)

_MAX_DETAILS = 1 << 14
"""The most characters of an answer's words that are read: a hostile server's might keep the patterns busy for hours."""
# "in ensemble 'demo', [request id: 7] Failed to process the request(s) for model 'demo_0_0', message: words
#  At: model.py(9): execute", and from DALI "Runtime error: Critical error in pipeline: ... encountered: words
#  C++ context: ...": people need the words.
_WRAPPING = re.compile(
    r"^(?:in ensemble '[^']*',\s*"
    r"|\[request id: [^\]]*\]\s*"
    r"|Failed to process the request\(s\) for model '[^']*',\s*message:\s*"
    r"|(?:RuntimeError: |Runtime error: |DALI error: )?Critical error in pipeline:.*?encountered:\s*"
    r"|DALI operator [\w.]+:\s*)*"
    r"(?P<words>.*?)(?:\n[^\S\n]*(?:At:\n|C\+\+ context:|Current pipeline object).*)?$",
    re.DOTALL,
)


def error_from_answer(status: str | None, details: str) -> CarnelianClientError:
    """Turn a gRPC status (or an error inside RESULT: status None) and its words into an error of the tree."""
    words = _WRAPPING.sub(r"\g<words>", details[:_MAX_DETAILS]).strip()
    kind, advice, size_advice = STATUS_ERRORS[status or "UNKNOWN"], "", ""
    if status == "UNIMPLEMENTED":  # Triton has every method that is called here
        advice = "this is not the gRPC endpoint of a Triton; check `url`, or the route of the proxy before it"
    for wording in _WORDINGS:
        if _may_mean(wording, status) and re.search(wording.pattern, words, re.IGNORECASE):
            _, kind, advice, size_advice = wording
            break
    message = words or "no reason was given"
    if advice:
        message = f"{message.rstrip('.')}; {advice}"
    return kind(message, size_advice=size_advice, status=status)


def _may_mean(wording: _Wording, status: str | None) -> bool:
    """Whether words of a status can have this meaning: those of gateways may sound as if they were about a clip."""
    if issubclass(wording.error, (InvalidAudio, InvalidOption)):
        return status in _OF_THE_REQUEST
    return STATUS_ERRORS[status or "UNKNOWN"] is not AccessDenied or wording.error is AccessDenied
