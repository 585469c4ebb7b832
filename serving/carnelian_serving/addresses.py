"""Finds the addresses and ports at which a server listens, and checks that the launcher can reach them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence

from carnelian_serving.errors import ServerError
from carnelian_serving.triton_options import by_name


def find_address(host: str) -> str:
    """Return a host's address, IPv4 for a name: Triton's HTTP server takes every name for 255.255.255.255.

    Raises:
        ServerError: The name means no address.
    """
    try:
        found = socket.getaddrinfo(host, None, _family(host), socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that no name may have, such as an empty one
        raise _no_address(host, error) from error
    return host if ":" in host else str(found[0][4][0])


@contextlib.contextmanager
def held_ports(host: str, wanted: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield ports that are free on `host`, and hold them: Triton opens its ports only once the models are loaded.

    Meanwhile nobody else is given one of them for any port. Who asks for it by its number may have it, as Triton does,
    if the socket is set to reuse addresses.

    Args:
        host: The address to listen on.
        wanted: Option name -> port, 0 for any.

    Raises:
        ServerError: A port is taken or asked for twice, or the host is not an address of this machine.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as sockets:
        for option, port in wanted.items():
            if port in chosen.values():
                raise ServerError(f"the ports must differ, but `{option}` is {port} as well; give it another")
            try:
                held = sockets.enter_context(socket.socket(_family(host)))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # A link-local address comes with its interface. Without listening, so that Triton can.
                held.bind(socket.getaddrinfo(host, port, _family(host), socket.SOCK_STREAM)[0][4])
            except OSError as error:
                # EINVAL: a link-local address without its interface
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
                    raise _no_address(host, error) from error
                if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
                    raise
                raise ServerError(
                    f"`{option}` must be a free port, but {port} on {host} cannot be had: "
                    f"{_reason(error)}; end what has it, or give another (`{option} 0` takes any)"
                ) from error
            chosen[option] = held.getsockname()[1]
        yield chosen


@contextlib.contextmanager
def first_on(host: str, ports: Mapping[str, int]) -> Iterator[None]:
    """Keep others that start a server off these ports: two could hold them, and take one server for that of both.

    Others that start one on another `host`, though it may be the same address, are not kept off.

    Args:
        host: The address to listen on.
        ports: Option name -> port.

    Raises:
        ServerError: Another one has begun to start a server on one of them.
    """
    with contextlib.ExitStack() as names:
        for option, port in ports.items():
            name = names.enter_context(socket.socket(socket.AF_UNIX))
            try:
                name.bind(f"\0carnelian {host} {port}")  # of no file, so that it ends with the process
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ServerError(
                    f"`{option}` must be a free port, but another server that starts will have {port} on {host}; "
                    f"end that, or give another (`{option} 0` takes any)"
                ) from error
        yield


def read_addresses(host: str, triton_options: Sequence[str]) -> dict[str, str]:
    """Return the host at which each of `http`, `grpc` and `metrics` can be reached.

    Args:
        host: The address to listen on.
        triton_options: Options of tritonserver, which may give each another address.

    Raises:
        ServerError: They name an address by a word.
    """
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    listening = _listening(host, triton_options)
    for kind in ("http", "metrics"):
        if not _is_address(listening[kind]):
            raise ServerError(
                f"`--{kind}-address` must be an IP address, but is {listening[kind]}; at a name, Triton listens where "
                "nobody can reach it"
            )
    return {kind: everywhere.get(address, address) for kind, address in listening.items()}


def open_to_others(host: str, triton_options: Sequence[str]) -> list[str]:
    """Return those of `http`, `grpc` and `metrics` that other machines may reach, or that may be so: a name is no sign.

    Args:
        host: The address to listen on.
        triton_options: Options of tritonserver, which may give each another address.
    """
    return [
        kind
        for kind, address in _listening(host, triton_options).items()
        if not (_is_address(address) and ipaddress.ip_address(address).is_loopback)
    ]


def _listening(host: str, triton_options: Sequence[str]) -> dict[str, str]:
    options = by_name(triton_options)
    found = {kind: options.get(f"--{kind}-address") or host for kind in ("http", "grpc", "metrics")}
    return {kind: address.removeprefix("ipv6:").strip("[]") for kind, address in found.items()}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _no_address(host: str, error: OSError | UnicodeError) -> ServerError:
    return ServerError(f"`--host` must be an address of this machine, but {host} is none: {_reason(error)}")


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "its parts must be names of 1 to 63 characters"
    return (error.strerror or str(error)).partition(" (while attempting")[0]
