import pickle

import grpc
import pytest
from carnelian_client import (
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
from carnelian_client._answers import STATUS_ERRORS, error_from_answer
from carnelian_client._errors import about, without_frames


def test_every_grpc_status_has_an_error():
    assert set(STATUS_ERRORS) == {status.name for status in grpc.StatusCode} - {"OK"}


def test_the_tree_is_the_one_that_is_drawn():
    assert set(TransportError.__subclasses__()) == {ConnectError, DeadlineExceeded}
    assert set(ServerError.__subclasses__()) == {ServerBusy, ModelNotReady, ModelNotFound, AccessDenied}
    assert set(CarnelianClientError.__subclasses__()) == {TransportError, ServerError, InvalidAudio, InvalidOption}


def test_only_what_may_pass_is_retryable():
    kinds = [CarnelianClientError, InvalidAudio, *STATUS_ERRORS.values(), ModelNotReady]
    assert {kind for kind in kinds if kind.retryable} == {ConnectError, ServerBusy, ModelNotReady}


# Status and words as Triton 2.51, DALI and gRPC gave them.
ANSWERS = [
    ("UNAVAILABLE", "in ensemble 'm', [request id: abc] Exceeds maximum queue size", ServerBusy),
    ("UNAVAILABLE", "in ensemble 'm', Request timeout expired", DeadlineExceeded),
    ("UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'", AccessDenied),
    ("NOT_FOUND", "Request for unknown model: 'm' is not found", ModelNotFound),
    ("NOT_FOUND", "Request for unknown model: 'm' has no available versions", ModelNotReady),
    (
        "INTERNAL",
        "in ensemble 'm', Failed to process the request(s) for model 'm_ctc_0_0', message: "
        "Stub process 'm_ctc_0_0' is not healthy.",
        ModelNotReady,
    ),
    ("INVALID_ARGUMENT", "unexpected inference input 'AUDIO' for model 'm_pcm'", ServerError),
    ("INVALID_ARGUMENT", "[request id: abc] inference request batch-size must be <= 1 for 'm'", ServerError),
    ("INVALID_ARGUMENT", "in ensemble 'm', no samples: a clip must hold at least one sample, but ...", InvalidAudio),
    ("INVALID_ARGUMENT", "in ensemble 'm', not finite: all samples must be finite numbers, but ...", InvalidAudio),
    ("INVALID_ARGUMENT", "in ensemble 'm', too long: a clip must be at most 60 s long, but ...", InvalidAudio),
    (
        "INVALID_ARGUMENT",
        "in ensemble 'm', too short: a clip must hold at least 400 samples, which make a frame, but ...",
        InvalidAudio,
    ),
    (
        "INVALID_ARGUMENT",
        "in ensemble 'm', wrong option: decoder must be one of greedy, beam, but is 'server not ready'",
        InvalidOption,
    ),
    ("RESOURCE_EXHAUSTED", "Sent message larger than max (9 vs. 8)", InvalidAudio),
    ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (9 vs. 8)", InvalidAudio),
    ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (17825792 vs. 16777216)", InvalidAudio),
    ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (17825792 vs. 16777216)", InvalidAudio),
    ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (9 vs. 8)", ServerError),
    ("RESOURCE_EXHAUSTED", "Received message larger than max (17825792 vs. 16777216)", ServerError),
    ("UNKNOWN", "too little memory for an input of this length, or of the length that it claims", InvalidAudio),
    ("RESOURCE_EXHAUSTED", "received metadata size exceeds hard limit (20567 vs. 16384)", ServerError),
    ("RESOURCE_EXHAUSTED", "quota", ServerBusy),
    ("UNAVAILABLE", "Server exiting", ModelNotReady),
    # Of gateways, whose words may be like those about clips.
    ("UNAUTHENTICATED", "token is malformed: could not base64 decode header", AccessDenied),
    ("UNAUTHENTICATED", "auth backend: connection reset", AccessDenied),
    ("PERMISSION_DENIED", "token lifetime too long", AccessDenied),
    ("UNAVAILABLE", "upstream took too long to answer", ConnectError),
    ("UNKNOWN", "Stream removed (Failed parsing HTTP/2 (Frame size 9 is larger than max frame size 8))", ConnectError),
    ("UNIMPLEMENTED", "Method not found!", ServerError),
    ("UNAVAILABLE", "Received http2 header with status: 503", ConnectError),
    ("UNAUTHENTICATED", "Received http2 header with status: 401", AccessDenied),
    ("INTERNAL", "in ensemble 'm', CUDA out of memory", ServerError),
    ("INTERNAL", "in ensemble 'm', Failed to open encoded data: Format not recognised.", InvalidAudio),
    ("INTERNAL", "Error in IRCAM file, unknown encoding format.", InvalidAudio),
    ("INTERNAL", f"unknown {'word ' * 3000}format", ServerError),  # a pattern of any length took half a second
    ("INTERNAL", "Error decoding file . Error: Requested 16000 samples but got 4096 samples.", InvalidAudio),
    ("UNAVAILABLE", "failed to connect to all addresses; last error: Connection refused", ConnectError),
    ("UNAVAILABLE", "Socket closed", ConnectError),
    (
        "UNAVAILABLE",
        "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:1: connection attempt timed out",
        ConnectError,
    ),
    ("INTERNAL", "Failed to open encoded data: Error : unknown error in flac decoder.", InvalidAudio),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded),
    (None, "no samples", InvalidAudio),
]


@pytest.mark.parametrize(("status", "words", "kind"), ANSWERS)
def test_an_answer_becomes_the_error_its_words_mean(status, words, kind):
    assert type(error_from_answer(status, words)) is kind


def test_the_message_is_the_words_without_their_wrapping_and_says_what_to_do():
    details = (
        "in ensemble 'm', Failed to process the request(s) for model 'audio_decode_0_0', message: "
        "RuntimeError: Critical error in pipeline:\n"
        "Error in CPU operator `nvidia.dali.fn.decoders.audio`,\n\nencountered:\n\n"
        "Failed to open encoded data: File contains data in an unimplemented format.\n"
        "C++ context: [generic_decoder.cc:208] \nCurrent pipeline object is no longer valid.\n\n"
        "At:\n  model.py(9)\n"
    )
    error = error_from_answer("INTERNAL", details)
    with pytest.raises(InvalidAudio), about("a.mp3", "m", "7"):
        raise error
    assert error.message.startswith(
        "Failed to open encoded data: File contains data in an unimplemented format; convert the file"
    )
    assert str(error).startswith("a.mp3: Failed")
    assert str(error).endswith("[model m, request 7, INTERNAL]")


@pytest.mark.parametrize("words", ["too long: 70.0 s", "too little memory for an input of this length"])
def test_a_recording_that_is_too_long_for_the_server_is_to_be_cut(words):
    assert error_from_answer("INVALID_ARGUMENT", words).size_advice.startswith("`transcribe_long`")


def test_blank_lines_by_the_thousand_do_not_keep_a_client():
    """A regular expression took a minute for 2,000 of them, and cubic time."""
    assert error_from_answer("INTERNAL", "x\n" + "\n" * 10**6 + "x\n  At:\n").message == "x"


def test_a_codec_that_is_not_read_is_not_called_damage_alone():
    error = error_from_answer("INTERNAL", "Failed to open encoded data: Error in WAV file. Malformed 'fmt ' chunk.")
    assert isinstance(error, InvalidAudio)
    assert "or of a codec that is not read; convert the file" in error.message


def test_the_native_dali_backends_message_loses_the_servers_traceback():
    details = (
        "in ensemble 'm', Runtime error: Critical error in pipeline:\n"
        "Error in CPU operator `nvidia.dali.fn.decoders.audio`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        '  File "/models/audio_decode/1/dali.py", line 42, in decode\n'
        "    clip, rate_hz = fn.decoders.audio(audio, dtype=types.FLOAT, downmix=True)\n\n"
        "encountered:\n\n"
        "Failed to open encoded data: Format not recognised.\n"
        "C++ context: [generic_decoder.cc:208] \nCurrent pipeline object is no longer valid."
    )
    error = error_from_answer("UNKNOWN", details)
    assert type(error) is InvalidAudio
    assert error.message.startswith("Failed to open encoded data: Format not recognised; convert the file")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Stream removed (Socket closed)", "the server ended, or wants `tls`, or `url` is not its gRPC port"),
        (
            "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            "the server ended, or",
        ),
        ("connection attempt timed out before receiving SETTINGS frame", "check `url`"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:8000: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "check `url` (Triton's gRPC port, usually 8001; 8000 speaks HTTP), `tls`, and that the server runs",
        ),
        (
            "UNKNOWN: ipv4:127.0.0.1:8001: Custom verification check failed with error: UNAUTHENTICATED: Hostname "
            "Verification Check failed",
            "the server's certificate does not name the host in `url`",
        ),
        (
            "UNAVAILABLE: ipv4:127.0.0.1:8001: Unwrap failed (TSI_DATA_CORRUPTED)",
            "the server refused this client: it must",
        ),
        (
            "UNKNOWN: ipv4:127.0.0.1:8001: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:10000418:"
            "SSL routines:OPENSSL_internal:TLSV1_ALERT_UNKNOWN_CA: OK",
            "the server refused this client: it must have a client certificate, in date, and of an authority",
        ),
        ("UNAVAILABLE: ipv4:127.0.0.1:8001: recvmsg:Connection reset by peer", "the server ended, or wants `tls`, or"),
        ("UNKNOWN: ipv4:127.0.0.1:3128: HTTP proxy returned response code 403", "the proxy of the environment refused"),
    ],
)
def test_a_broken_connection_says_what_may_be_the_reason(words, advice):
    assert error_from_answer("UNAVAILABLE", words).message.startswith(f"{words}; {advice}")


def test_an_alert_of_another_kind_is_not_about_the_clients_certificate():
    words = "Tls handshake failed: SSL_ERROR_SSL: OPENSSL_internal:TLSV1_ALERT_PROTOCOL_VERSION: see its certificate"
    assert error_from_answer("UNAVAILABLE", words).message.startswith(f"{words}; check `tls`")


def test_a_proxys_limit_of_size_is_said_to_be_one():
    error = error_from_answer("UNKNOWN", "Received http2 header with status: 413")
    assert type(error) is ServerError
    assert "a proxy before the server takes no request of this size, unless its limit is raised" in error.message
    assert error.message.endswith("; send a shorter clip, or a compressed form such as FLAC")


@pytest.mark.parametrize(
    ("status", "words", "kind", "advice"),
    [
        ("UNAVAILABLE", "Received http2 header with status: 429", ServerBusy, "send fewer clips at a time"),
        ("UNAVAILABLE", "Received http2 header with status: 503", ConnectError, "or limits the requests"),
        ("UNAVAILABLE", "Received http2 header with status: 504", ConnectError, "`grpc_read_timeout`"),
        ("UNKNOWN", "Received http2 header with status: 301", ServerError, "use the port of its TLS in `url`"),
        ("UNKNOWN", "Received http2 header with status: 500", ServerError, "and its log"),
        # nginx with `proxy_pass` in the place of `grpc_pass`
        ("UNKNOWN", "Received http2 header with status: 0", ServerError, "passes gRPC on (nginx: `grpc_pass`)"),
        (
            "INTERNAL",
            "Stream removed (Data frame with END_STREAM flag received) (RST_STREAM (Received RST_STREAM with error "
            "code 0))",
            ServerError,
            "a proxy or a web server answered in the place of Triton",
        ),
        (
            "UNAVAILABLE",
            "Stream removed (Socket closed (GOAWAY received; Error code: 11; Debug Text: ))",
            ServerError,
            "nginx does so if headers are too long",
        ),
        (
            "UNAVAILABLE",
            "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))",
            ConnectError,
            "HAProxy may do so if `proto h2` is missing",
        ),
    ],
)
def test_what_nginx_and_haproxy_answer_by_themselves_is_explained(status, words, kind, advice):
    error = error_from_answer(status, words)
    assert type(error) is kind
    assert advice in error.message


def test_a_proxy_that_wants_a_client_certificate_is_said_to_be_one():
    error = error_from_answer("INTERNAL", "Received http2 header with status: 400")
    assert type(error) is ServerError
    assert "nginx does so where it wants a client certificate, in date" in error.message


def test_an_unknown_model_is_advised_on_at_a_shell_too():
    message = error_from_answer("NOT_FOUND", "Request for unknown model: 'm' is not found").message
    assert "a server has the models that it has loaded, by default as it started" in message
    assert message.endswith("lists them, as does `curl -X POST HOST:8000/v2/repository/index`")


@pytest.mark.parametrize("kind", [InvalidAudio, DeadlineExceeded])
def test_errors_travel_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("words", clip="a.wav", request_id="7")))
    assert type(error) is kind
    assert (str(error), error.clip) == ("a.wav: words [request 7]", "a.wav")


@pytest.mark.parametrize(
    ("status", "words", "advice"),
    [
        ("UNIMPLEMENTED", "Method not found!", "check `url`"),
        ("UNIMPLEMENTED", "unknown service inference.GRPCInferenceService", "check `url`"),
        ("UNIMPLEMENTED", "", "check `url`"),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", "the route of the proxy"),
        (
            "UNAUTHENTICATED",
            "Received http2 header with status: 401",
            "if it wants a key, there was none or a wrong one; see `api_key`",
        ),
        ("UNAVAILABLE", "CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "the server's certificate is out of"),
    ],
)
def test_what_to_do_about_a_proxy_or_another_server_is_said(status, words, advice):
    assert advice in error_from_answer(status, words).message


def caught(error, cause=None):
    """An error that was raised, and so has frames, from a cause."""
    try:
        raise error from cause
    except OSError as raised:
        return raised


def test_frames_are_taken_from_errors_behind_one_that_has_none():
    deepest, beside = caught(OSError("deepest")), caught(OSError("beside"))
    bare = OSError("never raised")
    bare.__cause__, bare.__context__ = deepest, beside
    error = caught(OSError("first"), bare)
    assert without_frames(error) is error
    assert [each.__traceback__ for each in (error, bare, deepest, beside)] == [None] * 4


def test_frames_are_taken_from_errors_in_a_circle():
    first, second = caught(OSError("first")), caught(OSError("second"))
    first.__cause__, second.__cause__ = second, first
    without_frames(first)
    assert (first.__traceback__, second.__traceback__) == (None, None)
