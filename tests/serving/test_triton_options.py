"""Options behind `--`: which the launcher refuses, and how the others reach tritonserver."""

import pytest
from carnelian_serving.addresses import open_to_others, read_addresses
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server
from carnelian_serving.triton_options import OWN_OPTIONS, StrayWordError, check_options, close_shared_memory, trim_key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["trace"], "but 'trace' does not; a folder of models is given as --repository"),
        (["--log-file", "a=b"], "but 'a' does not; write `--log-file=VALUE`"),
        (["--http-port", "1"], "write `--http-port=1`"),
    ],
)
def test_a_word_that_is_no_option_is_told_from_python_too(tmp_path, options, words):
    """A value apart from its option reached Triton, and the launcher had not read it."""
    with pytest.raises(StrayWordError, match=words):
        Server(tmp_path, triton_options=options)


@pytest.mark.parametrize(
    "option",
    [
        "--allow-http=Off",
        "--http-restricted-api=trace,health:key=1",
        "--exit-timeout=9",
        "--http-po=1",
        "--allow-ht=false",
    ],
)
def test_what_hides_readiness_from_the_launcher_is_refused(option):
    with pytest.raises(ServerError, match=option.partition("=")[0]):
        check_options([option, "--http-restricted-api=trace:key=1"])


def test_no_key_is_shown_where_readiness_would_be_hidden():
    with pytest.raises(ServerError) as refused:
        check_options(["--http-restricted-api=health:a-header=secret"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["--http-restricted-protocol", "--grpc_restricted_api", "--grpc-resticted-api"])
def test_a_misspelt_restriction_is_refused_without_its_key(name):
    with pytest.raises(ServerError, match="restrictions must be --grpc-restricted-protocol or ") as refused:
        check_options([f"{name}=trace:header=secret"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("option", ["--allow-vertex-ai=true", "--allow-sagemaker=1", "--allow-v=true"])
def test_a_port_without_restrictions_is_not_opened(option):
    with pytest.raises(ServerError, match=option.partition("=")[0]):
        check_options([option])
    check_options(["--allow-vertex-ai=false"])


@pytest.mark.parametrize("option", ["--cache-config=local,size=1048576", "--response-cache-byte-size=1048576"])
def test_no_request_gets_the_answer_to_another(option):
    with pytest.raises(ServerError, match=f"an answer of its own, but by `{option.partition('=')[0]}`"):
        check_options([option])
    check_options(["--cache-directory=/caches"])


@pytest.mark.parametrize(("option", "own"), OWN_OPTIONS.items())
def test_an_option_that_the_launcher_has_is_named(option, own):
    with pytest.raises(ServerError, match=f"`{own}` must stand before the `--`, but `{option}`"):
        check_options([f"{option}=1"])


@pytest.mark.parametrize(
    ("option", "passed_on"),
    [
        ("--grpc-restricted-protocol=trace:key= two words=\r\n", "--grpc-restricted-protocol=trace:key=two words="),
        ("--http-restricted-api=trace:key=1", "--http-restricted-api=trace:key=1"),
        ("--log-file= x ", "--log-file= x "),
    ],
)
def test_keys_lose_the_white_space_around_them_alone(option, passed_on):
    assert trim_key(option) == passed_on


@pytest.mark.parametrize("key", ["", "\n", "two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key):
    with pytest.raises(ServerError, match="the key of `--grpc-restricted-protocol=trace:key` must be") as refused:
        trim_key(f"--grpc-restricted-protocol=trace:key={key}")
    assert not key.strip() or key not in str(refused.value)


@pytest.mark.parametrize("value", ["trace", "trace:secret", "secret=1", ":key=secret", "trace:=secret"])
def test_restricted_protocols_without_a_header_and_a_key_are_refused_unseen(value):
    with pytest.raises(ServerError, match=r"`--http-restricted-api` must be PROTOCOL,\.\.\.:HEADER=KEY") as refused:
        trim_key(f"--http-restricted-api={value}")
    assert value not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "options", "wanted"),
    [
        ("127.0.0.1", [], []),
        ("::1", [], []),
        ("0.0.0.0", [], ["grpc", "http", "metrics"]),
        ("::", ["--grpc-address=[::1]"], ["http", "metrics"]),
        ("127.0.0.1", ["--metrics-address=0.0.0.0"], ["metrics"]),
        ("127.0.0.1", ["--grpc-address=a-name"], ["grpc"]),
    ],
)
def test_what_other_machines_may_reach(host, options, wanted):
    assert sorted(open_to_others(host, options)) == wanted


def test_shared_memory_is_closed_where_it_has_no_key_of_the_users():
    ports = ["grpc", "http", "metrics"]
    own = [
        "--grpc-restricted-protocol=trace:a=1",
        "--grpc-restricted-protocol=logging,shared-memory:b=2",
        "--http-restricted-api=trace:shared-memory=shared-memory",  # a header and a key that are called so
    ]
    (closed,) = close_shared_memory(ports, own)
    assert closed.startswith("--http-restricted-api=shared-memory:closed-by-carnelian-serve=")
    assert trim_key(closed) == closed
    assert len({*close_shared_memory(ports, []), *close_shared_memory(ports, [])}) == 4
    assert close_shared_memory([], []) == []


@pytest.mark.parametrize("option", ["--http-address", "--metrics-address"])
def test_an_address_that_is_a_name_is_refused(option):
    with pytest.raises(ServerError, match=option):
        read_addresses("127.0.0.1", [f"{option}=localhost"])
