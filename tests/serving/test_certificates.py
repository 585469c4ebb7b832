"""What gRPC's certificates must be, seen before any model loads."""

import subprocess
from pathlib import Path

import pytest
from carnelian_serving.certificates import check_certificates
from carnelian_serving.errors import ServerError


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
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


def options_of(files: Path, names: dict[str, str]) -> list[str]:
    return [
        f"--grpc-{option}={value if value in ('true', 'false') else files / value}" for option, value in names.items()
    ]


OWN = {"use-ssl": "true", "server-cert": "own.crt", "server-key": "own.key"}
MUTUAL = OWN | {"use-ssl-mutual": "true", "root-cert": "other.crt"}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (OWN | {"server-key": "other.key"}, "must be PEM files that belong together, .*mismatch"),
        (OWN | {"server-cert": "locked.crt", "server-key": "locked.key"}, "must be .* without a password"),
        (OWN | {"server-cert": "own.key"}, "must be PEM files that belong together"),
        (OWN | {"server-cert": "no.crt"}, r"`--grpc-server-cert` must be a PEM file, but .*no\.crt cannot be read"),
        (MUTUAL | {"root-cert": "no.crt"}, r"`--grpc-root-cert` must be a PEM file, but .*no\.crt cannot be read"),
        (MUTUAL | {"root-cert": "empty.crt"}, r"`--grpc-root-cert` must be .* certificates, but .*empty\.crt is none"),
        (MUTUAL | {"root-cert": "own.key"}, "is none"),
        ({"use-ssl": "true"}, "`--grpc-server-cert` must be given with `--grpc-use-ssl`, but is not"),
        ({"use-ssl-mutual": "true"}, "`--grpc-server-cert` must be given with `--grpc-use-ssl`, but is not"),
        (OWN | {"use-ssl-mutual": "true"}, "`--grpc-root-cert` must be given with `--grpc-use-ssl-mutual`, but is not"),
    ],
)
def test_files_that_cannot_be_used_are_named(names, reason, files):
    with pytest.raises(ServerError, match=reason):
        check_certificates(options_of(files, names))


@pytest.mark.parametrize("names", [OWN, MUTUAL, {"use-ssl": "false", "server-cert": "no.crt"}, {}])
def test_files_that_can_or_need_not_are_not(names, files):
    check_certificates(options_of(files, names))


def test_they_are_looked_at_before_models_load(cut_repository, files, make_server):
    options = options_of(files, OWN | {"server-key": "other.key"})
    server = make_server(cut_repository, triton_options=options)
    with pytest.raises(ServerError, match="must be PEM files that belong together"):
        server.start()
    assert server.log == []
