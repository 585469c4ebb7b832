"""Reads the options that are passed on to tritonserver, as far as the launcher has to know them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise

from carnelian_serving.errors import ServerError

RESTRICTIONS = {"grpc": "--grpc-restricted-protocol", "http": "--http-restricted-api"}
SHARED_MEMORY = "shared-memory"
UNRESTRICTED = ("--allow-sagemaker", "--allow-vertex-ai")
"""Options that open a port on every address, through which callers reach all protocols without a key."""
CACHES = ("--cache-config", "--response-cache-byte-size")
"""Options by which Triton answers a request as it did an earlier one, if the tensors are the same. It compares neither
their parameters, which are the options of a model, nor their ids, nor which outputs they want."""
OWN_OPTIONS = {
    "--http-port": "--http-port",
    "--grpc-port": "--grpc-port",
    "--metrics-port": "--metrics-port",
    "--exit-timeout-secs": "--exit-timeout",
    "--model-repository": "--repository",
    "--model-store": "--repository",
}
"""Options that the launcher sets itself, and its own name for each."""
READ_OPTIONS = (
    *(*OWN_OPTIONS, *RESTRICTIONS.values(), *UNRESTRICTED, *CACHES),
    *("--log-file", "--exit-on-error", "--strict-readiness"),
    *("--allow-http", "--allow-grpc", "--allow-metrics", "--http-address", "--grpc-address", "--metrics-address"),
    *("--grpc-use-ssl", "--grpc-use-ssl-mutual", "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"),
)
"""The options whose values are read here. They must be spelled out, although tritonserver takes abbreviations."""


_RESTRICTION = re.compile("[^:=]+:[^:=]+=.*", re.DOTALL)


class StrayWordError(ServerError):
    """Among the options there is a word that is none."""


def check_options(triton_options: Sequence[str]) -> None:
    """Check that the launcher understands the options, and can still ask whether the models are ready.

    Raises:
        StrayWordError: An option does not begin with `--`.
        ServerError: An option is abbreviated, has an option of the launcher itself, closes readiness over HTTP,
            opens a port that nothing restricts, or has answers cached.
    """
    _check_words(triton_options)
    for option in triton_options:
        name, _, value = option.partition("=")
        whole = [known for known in READ_OPTIONS if known.startswith(name)]
        if whole and name not in whole:
            raise ServerError(
                f"options of tritonserver that are checked here must be spelled out, but `{name}` may be `{whole[0]}`"
            )
        # Whatever the name, Triton's own words would repeat the key.
        restricts = "restricted" in name or _RESTRICTION.fullmatch(value)
        if restricts and name not in RESTRICTIONS.values():
            raise ServerError(f"restrictions must be {' or '.join(RESTRICTIONS.values())}, but there is `{name}`")
        if name in OWN_OPTIONS:
            raise ServerError(f"`{OWN_OPTIONS[name]}` must stand before the `--`, but `{name}` comes after it")
        if name in UNRESTRICTED and is_on(value):
            raise ServerError(
                f"`--host` and restricted protocols must hold for every port, but `{name}` opens one for which they do "
                "not; leave it out"
            )
        if name in CACHES:
            raise ServerError(
                f"each request must get an answer of its own, but by `{name}` it may get one to other options, with "
                "another caller's id; leave it out"
            )
        hides_health = name == RESTRICTIONS["http"] and "health" in _protocols(value)
        if hides_health or (name == "--allow-http" and not is_on(value)):
            raise ServerError(
                f"the launcher must be able to ask for readiness over HTTP, but `{name}` takes that away; "
                "`--http-address=127.0.0.1` keeps others from it"
            )


def trim_key(option: str) -> str:
    """Return an option, the key of restricted protocols without white space around it.

    No header carries that, and the Secret that a key comes from often ends its line, being made of a file.

    Raises:
        ServerError: There is no key, or no header could carry what is left. Triton's own words would repeat the key.
    """
    name, _, value = option.partition("=")
    if name not in RESTRICTIONS.values():
        return option
    restricted, equals, key = value.partition("=")
    protocols, _, header = restricted.partition(":")
    if not (protocols and header and equals):
        raise ServerError(
            f"the value of `{name}` must be PROTOCOL,...:HEADER=KEY, but has another form; mend it (it is not shown, "
            "for a key may be in it)"
        )
    key = key.strip()
    if not (key and key.isascii() and key.isprintable()):
        found = "has other characters" if key else "is empty"
        raise ServerError(f"the key of `{name}={restricted}` must be one line of ASCII text, but {found}")
    return f"{name}={restricted}={key}"


def close_shared_memory(kinds: Iterable[str], triton_options: Sequence[str]) -> list[str]:
    """Return options that close the protocol of shared memory with a key that nobody knows, unless it has one already.

    A caller may have the server read and write any shared memory of its user, and learns the names of the server's own
    from error messages.

    Args:
        kinds: The ports to close it at, those that have it: `grpc`, `http`.
        triton_options: The other options of tritonserver.
    """
    has_key = {
        name
        for name, _, value in (option.partition("=") for option in triton_options)
        if name in RESTRICTIONS.values() and SHARED_MEMORY in _protocols(value)
    }
    wanted = {RESTRICTIONS[kind] for kind in kinds if kind in RESTRICTIONS} - has_key
    # Triton names the header to those whom it refuses.
    return [f"{name}={SHARED_MEMORY}:closed-by-carnelian-serve={secrets.token_hex(16)}" for name in sorted(wanted)]


def has_port(kind: str, triton_options: Sequence[str]) -> bool:
    """Return whether tritonserver opens its port of `kind`: `grpc`, `http`, `metrics`."""
    return is_on(by_name(triton_options).get(f"--allow-{kind}", "true"))


def by_name(triton_options: Sequence[str]) -> dict[str, str]:
    """Return the values of options `--name=value`, by name."""
    return dict(option.partition("=")[::2] for option in triton_options)


def is_on(value: str) -> bool:
    """Return the value of a yes-or-no option, as tritonserver reads it."""
    return value.lower() not in ("false", "off", "0")


def _check_words(triton_options: Sequence[str]) -> None:
    """Check that all are options; name no key in an error."""
    for before, word in pairwise(["", *triton_options]):
        if not word.startswith("--"):
            is_value = before.startswith("--") and "=" not in before
            has_key = is_value and any(name.startswith(before) for name in RESTRICTIONS.values())
            # What follows the = may be a key as well.
            found = f"what follows {before}" if has_key else repr(word.partition("=")[0])
            value = "PROTOCOLS:HEADER=KEY" if has_key else "VALUE" if "=" in word else word
            advice = f"write `{before}={value}`" if is_value else "a folder of models is given as --repository"
            raise StrayWordError(f"an option of tritonserver must begin with --, but {found} does not; {advice}")


def _protocols(value: str) -> list[str]:
    return value.partition(":")[0].split(",")
