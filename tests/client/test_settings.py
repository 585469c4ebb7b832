import asyncio
import pickle
import subprocess
from pathlib import Path

import grpc
import pytest
from carnelian_client import TLS, AsyncCarnelianClient, CarnelianClient, ConnectError, RetryPolicy

NO_RETRY = RetryPolicy(num_attempts=1)


@pytest.mark.parametrize("kind", [CarnelianClient, AsyncCarnelianClient])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "http://localhost:8000"}, "host:port of Triton's gRPC endpoint"),
        ({"url": "grpcs://localhost:8001"}, "host:port"),
        ({"url": "localhost"}, "host:port"),
        ({"url": "localhost:"}, "host:port"),
        ({"url": "localhost:a"}, "host:port"),
        ({"url": "localhost:8001/"}, "host:port"),
        ({"url": "tcp://localhost:8001"}, "host:port"),
        ({"url": "dns:///localhost"}, "host:port"),
        ({"url": "::1"}, r"\[::1\]:8001"),
        ({"url": "fe80::1:8001"}, "host:port"),
        ({"model": "\udcff"}, "`model` must be text in UTF-8"),
        ({"model": ""}, "`model` must not be empty"),
        ({"timeout_s": 0}, "`timeout_s` must be above 0"),
        ({"timeout_s": float("nan")}, "`timeout_s` must be above 0"),
        ({"timeout_s": float("inf")}, "at most 1e[+]09"),
        ({"timeout_s": 1e12}, "at most 1e[+]09, but is 1000000000000.0"),
        ({"url": "localhost:0"}, "a port from 1 to 65535"),
        ({"url": "localhost:65536"}, "a port from 1 to 65535"),
        ({"api_key": "secret\n"}, "`api_key`, sent as 'authorization' must have .* strip a key"),
        ({"api_key": ""}, "`api_key` must be a key, but is empty"),
        ({"headers": {"a b": "c"}}, "header 'a b'"),
        ({"headers": {"Authorization": "secret\n"}}, "^header 'authorization' must have .* strip a key"),
        ({"headers": {"X-Key": "a", "x-key": "b"}}, "each header once, in whatever case, but has X-Key, x-key"),
        ({"headers": {"trace-bin": "c"}}, "header .trace-bin. must .* not ending in -bin"),
        ({"headers": {"Authorization": "Basic x"}, "api_key": "k"}, "choose one"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(kind, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        kind(**arguments)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "request_id"])
def test_an_empty_name_is_not_taken_for_the_default(wav, name):
    with CarnelianClient("localhost:1") as client, pytest.raises(ValueError, match=f"`{name}` must not be empty"):
        client.transcribe(wav, **{name: ""})


@pytest.mark.parametrize(
    "url",
    [
        *("[::1]:8001", "dns:///name:8001", "dns://8.8.8.8/name:8001", "dns:name:8001", "vsock:2:8001", "xds:///name"),
        *("ipv4:127.0.0.1:8001,127.0.0.2:8001", "ipv6:[::1]:8001", "unix:triton.sock", "unix:///run/triton.sock"),
        *("name:1", "name:65535", "vsock:2:99999", "unix:/run/triton:99999"),
    ],
)
def test_every_target_of_grpc_is_an_address(url):
    AsyncCarnelianClient(url)


@pytest.mark.parametrize(
    "arguments", [{"num_attempts": 0}, {"first_wait_s": 0}, {"first_wait_s": 2, "longest_wait_s": 1}]
)
def test_a_retry_policy_checks_its_fields(arguments):
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**arguments)


def test_a_client_certificate_needs_its_key():
    with pytest.raises(ValueError, match="add `key_path`"):
        TLS(cert_path="cert.pem")


def test_headers_and_the_api_key_are_sent_with_every_call(endpoint, triton, wav):
    headers = {"Triton-Grpc-Protocol-Infer-Key": "open sesame"}
    with CarnelianClient(endpoint.url, headers=headers, api_key="secret") as client:
        client.transcribe(wav)
        client.is_ready()
        assert "secret" not in repr(client)
        assert "secret" not in repr(client._settings)
    for metadata in triton.metadata:
        assert metadata["triton-grpc-protocol-infer-key"] == "open sesame"
        assert metadata["authorization"] == "Bearer secret"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A private authority, what it signed for a server on 127.0.0.1 and for a client, and a stranger of its own."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "2")
    openssl("req", "-x509", *new_key, "-keyout", "stranger.key", "-out", "stranger.pem", "-subj", "/CN=stranger")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


@pytest.fixture
def start_tls_endpoint(certificates, start_endpoint):
    def start(*, wants_client_certificate):
        pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
        ca = (certificates / "ca.pem").read_bytes() if wants_client_certificate else None
        credentials = grpc.ssl_server_credentials([pair], ca, wants_client_certificate)
        return start_endpoint(credentials=credentials)

    return start


def test_tls_with_a_private_authority(certificates, start_tls_endpoint, wav):
    endpoint = start_tls_endpoint(wants_client_certificate=False)
    with CarnelianClient(endpoint.url, tls=TLS(ca_path=certificates / "ca.pem")) as client:
        assert client.transcribe(wav).text


def test_tls_with_a_private_authority_in_asyncio(certificates, start_tls_endpoint, wav):
    async def transcribe(url):
        async with AsyncCarnelianClient(url, tls=TLS(ca_path=certificates / "ca.pem")) as client:
            return await client.transcribe(wav)

    assert asyncio.run(transcribe(start_tls_endpoint(wants_client_certificate=False).url)).text


def test_tls_refuses_a_server_that_no_known_authority_signed(start_tls_endpoint, wav):
    endpoint = start_tls_endpoint(wants_client_certificate=False)
    client = CarnelianClient(endpoint.url, tls=TLS(), retry=NO_RETRY)
    with client, pytest.raises(ConnectError, match="check `tls`"):
        client.transcribe(wav)


def test_mutual_tls(certificates, start_tls_endpoint, wav):
    endpoint = start_tls_endpoint(wants_client_certificate=True)
    ca = certificates / "ca.pem"
    pair = {"cert_path": certificates / "client.pem", "key_path": certificates / "client.key"}
    with CarnelianClient(endpoint.url, tls=TLS(ca_path=ca, **pair)) as client:
        assert client.transcribe(wav).text


@pytest.mark.parametrize("name", [None, "stranger"])
def test_a_client_certificate_that_is_missing_or_refused_is_named(certificates, start_tls_endpoint, wav, name):
    endpoint = start_tls_endpoint(wants_client_certificate=True)
    pair = {"cert_path": certificates / f"{name}.pem", "key_path": certificates / f"{name}.key"} if name else {}
    client = CarnelianClient(endpoint.url, tls=TLS(ca_path=certificates / "ca.pem", **pair), retry=NO_RETRY)
    with client, pytest.raises(ConnectError, match=r"a client certificate, in date, .* \(`cert_path` and `key_path`"):
        client.transcribe(wav)


@pytest.mark.parametrize("name", ["ca.key", "empty.pem"])
def test_a_file_of_no_authorities_trusts_nobody_else(certificates, tmp_path, name):
    (tmp_path / "empty.pem").touch()
    path = tmp_path / name if name == "empty.pem" else certificates / name
    with pytest.raises(ValueError, match=f"`ca_path` must be a PEM file of certificates, but {path} is none"):
        CarnelianClient("localhost:8001", tls=TLS(ca_path=path))


def test_a_key_of_another_certificate_is_said_at_once(certificates):
    tls = TLS(cert_path=certificates / "client.pem", key_path=certificates / "stranger.key")
    with pytest.raises(ValueError, match=r"must be PEM files that belong together, .*stranger\.key are not"):
        CarnelianClient("localhost:8001", tls=tls)


@pytest.mark.parametrize("kind", [CarnelianClient, AsyncCarnelianClient])
def test_a_client_stays_in_its_process_and_keeps_its_key(kind):
    with pytest.raises(TypeError, match="make one there"):
        pickle.dumps(kind("localhost:8001", api_key="secret"))


@pytest.mark.parametrize("kind", [CarnelianClient, AsyncCarnelianClient])
def test_a_certificate_that_is_not_there_is_said_at_once(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ca\.pem"):
        kind("localhost:8001", tls=TLS(ca_path=tmp_path / "ca.pem"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "dns:///localhost"])
def test_no_proxy_is_asked_for_this_machines_own_address(endpoint, monkeypatch, host):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with CarnelianClient(f"{host}:{endpoint.url.rpartition(':')[2]}") as client:
        assert client.is_ready()
