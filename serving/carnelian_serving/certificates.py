"""The certificates that gRPC is to use, looked at before models load.

Of a key that does not fit Triton says that its port is in use, after all models have loaded; and without the
authorities that clients need a certificate of, it gets ready and refuses all of them.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from carnelian_serving.errors import ServerError

CERTIFICATE, KEY, AUTHORITIES = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"


def check_certificates(triton_options: Sequence[str]) -> None:
    """See that the files which options of tritonserver name can be used.

    Raises:
        ServerError: One cannot be read, is no PEM, or the key is not that of the certificate.
    """
    options = dict(option.partition("=")[::2] for option in triton_options)
    files = {name: options[name] for name in (CERTIFICATE, KEY, AUTHORITIES) if options.get(name)}
    for name, file in files.items():
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ServerError(f"`{name}` must be a PEM file, but {file} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # how strong a key has to be is gRPC's to say
    if CERTIFICATE in files and KEY in files:
        try:
            context.load_cert_chain(files[CERTIFICATE], files[KEY], password=lambda: "none")
        except ssl.SSLError as error:
            raise ServerError(
                f"`{CERTIFICATE}` and `{KEY}` must be PEM files that belong together, the key without a password, but "
                f"{files[CERTIFICATE]} and {files[KEY]} are not: {error}"
            ) from error
    if AUTHORITIES in files:
        try:
            context.load_verify_locations(files[AUTHORITIES])
        except ssl.SSLError as error:
            raise ServerError(
                f"`{AUTHORITIES}` must be a PEM file of certificates, but {files[AUTHORITIES]} is none: {error}"
            ) from error
