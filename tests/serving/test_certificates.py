"""What gRPC's certificates must be, seen before any model loads."""

import subprocess
from pathlib import Path

import pytest
from carnelian_serving.certificates import check_certificates
from carnelian_serving.errors import ServerError
from carnelian_serving.launcher import Server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name, protection in (("own", ["-nodes"]), ("other", ["-nodes"]), ("locked", ["-passout", "pass:x"])):
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            *protection,
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
        ]
        command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run(command, check=True, capture_output=True)
    (folder / "empty.crt").touch()
    return folder


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"server-cert": "own.crt", "server-key": "other.key"}, "must be PEM files that belong together, .*mismatch"),
        ({"server-cert": "locked.crt", "server-key": "locked.key"}, "must be .* without a password"),
        ({"server-cert": "own.key", "server-key": "own.key"}, "must be PEM files that belong together"),
        ({"server-cert": "missing.crt"}, r"`--grpc-server-cert` must be a PEM file, but .*missing\.crt cannot be read"),
        ({"root-cert": "missing.crt"}, r"`--grpc-root-cert` must be a PEM file, but .*missing\.crt cannot be read"),
        (
            {"root-cert": "empty.crt"},
            r"`--grpc-root-cert` must be a PEM file of certificates, but .*empty\.crt is none",
        ),
        ({"root-cert": "own.key"}, "is none"),
    ],
)
def test_files_that_cannot_be_used_are_named(options: dict[str, str], reason: str, files: Path) -> None:
    with pytest.raises(ServerError, match=reason):
        check_certificates([f"--grpc-{option}={files / name}" for option, name in options.items()])


def test_files_that_can_are_not(files: Path) -> None:
    names = {"server-cert": "own.crt", "server-key": "own.key", "root-cert": "other.crt"}
    check_certificates(["--grpc-use-ssl=true", *(f"--grpc-{option}={files / name}" for option, name in names.items())])
    check_certificates([])


def test_they_are_looked_at_before_models_load(cut_repository: Path, files: Path) -> None:
    server = Server(
        cut_repository, http_port=0, grpc_port=0, metrics_port=0, triton_options=[f"--grpc-root-cert={files}/no.crt"]
    )
    with pytest.raises(ServerError, match="`--grpc-root-cert` must be a PEM file"):
        server.start()
    assert server.log == []
