"""Checks the certificates of gRPC before models load.

Of a key that does not fit Triton says that its port is in use, after all models have loaded; and without the
authorities that clients need a certificate of, it gets ready and refuses all of them.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from carnelian_serving.errors import ServerError
from carnelian_serving.triton_options import by_name, is_on

CERTIFICATE, KEY, AUTHORITIES = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"
ENCRYPTED, MUTUAL = "--grpc-use-ssl", "--grpc-use-ssl-mutual"


def check_certificates(triton_options: Sequence[str]) -> None:
    """Check that the certificate files which tritonserver's options name can be used.

    Raises:
        ServerError: One is not named, cannot be read or is no PEM, or the key is not that of the certificate.
    """
    options = by_name(triton_options)
    is_mutual = is_on(options.get(MUTUAL, "false"))
    if not is_mutual and not is_on(options.get(ENCRYPTED, "false")):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # gRPC decides how strong a key has to be
    certificate, key = (_find(options, name, ENCRYPTED) for name in (CERTIFICATE, KEY))
    try:
        # OpenSSL would ask the terminal for a password.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ServerError(
            f"`{CERTIFICATE}` and `{KEY}` must be PEM files that belong together, the key without a password, but "
            f"{certificate} and {key} are not: {error}"
        ) from error
    if is_mutual:
        authorities = _find(options, AUTHORITIES, MUTUAL)
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise ServerError(
                f"`{AUTHORITIES}` must be a PEM file of certificates, but {authorities} is none: {error}"
            ) from error


def _find(options: Mapping[str, str], name: str, reason: str) -> str:
    file = options.get(name)
    if not file:
        raise ServerError(f"`{name}` must be given with `{reason}`, but is not")
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise ServerError(f"`{name}` must be a PEM file, but {file} cannot be read: {error.strerror}") from error
    return file
