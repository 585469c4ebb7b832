"""The options of tritonserver that are passed on to it, as far as the launcher has to know what they say."""

from __future__ import annotations

from collections.abc import Sequence

from carnelian_serving.errors import ServerError

RESTRICTIONS = ("--grpc-restricted-protocol", "--http-restricted-api")
OWN_OPTIONS = {
    "--http-port": "--http-port",
    "--grpc-port": "--grpc-port",
    "--metrics-port": "--metrics-port",
    "--exit-timeout-secs": "--exit-timeout",
    "--model-repository": "--repository",
    "--model-store": "--repository",
}
"""What the launcher sets, and its own option for it."""
READ_OPTIONS = (
    *(*OWN_OPTIONS, *RESTRICTIONS, "--log-file", "--exit-on-error"),
    *("--allow-http", "--allow-grpc", "--allow-metrics", "--http-address", "--grpc-address", "--metrics-address"),
    *("--grpc-use-ssl", "--grpc-use-ssl-mutual", "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"),
)
"""Those that are. tritonserver takes the beginning of a name for the whole, as nothing here does."""


def check_options(triton_options: Sequence[str]) -> None:
    """See that the launcher knows what they say, and can still ask whether the models are ready.

    Raises:
        ServerError: One is not spelled out, has an option of the launcher itself, or takes readiness over HTTP away.
    """
    for option in triton_options:
        name, _, value = option.partition("=")
        whole = [known for known in READ_OPTIONS if known.startswith(name)]
        if whole and name not in whole:
            raise ServerError(f"options of tritonserver must be spelled out, but `{name}` is not; write `{whole[0]}`")
        if name in OWN_OPTIONS:
            raise ServerError(f"`{OWN_OPTIONS[name]}` must stand before the `--`, but `{name}` comes after it")
        hides_health = name == "--http-restricted-api" and "health" in value.partition(":")[0].split(",")
        if hides_health or (name == "--allow-http" and not is_on(value)):
            raise ServerError(
                f"the launcher must be able to ask for readiness over HTTP, but `{option}` takes that away; "
                "`--http-address=127.0.0.1` keeps others from it"
            )


def trim_key(option: str) -> str:
    """Return an option, the key of restricted protocols without white space around it.

    No header carries that, and the Secret that a key comes from often ends its line, being made of a file.

    Raises:
        ServerError: No header could carry what is left.
    """
    name, _, value = option.partition("=")
    restricted, equals, key = value.partition("=")
    if name not in RESTRICTIONS or not equals:
        return option
    key = key.strip()
    if not (key and key.isascii() and key.isprintable()):
        found = "has other characters" if key else "is empty"
        raise ServerError(f"the key of `{name}={restricted}` must be one line of ASCII text, but {found}")
    return f"{name}={restricted}={key}"


def has_port(kind: str, triton_options: Sequence[str]) -> bool:
    """Return whether tritonserver opens its port of `kind`: `grpc`, `http`, `metrics`."""
    return is_on(by_name(triton_options).get(f"--allow-{kind}", "true"))


def by_name(triton_options: Sequence[str]) -> dict[str, str]:
    """Return the values of options of tritonserver, which are `--name=value`."""
    return dict(option.partition("=")[::2] for option in triton_options)


def is_on(value: str) -> bool:
    """Return what tritonserver takes the value of a yes-or-no option for."""
    return value.lower() not in ("false", "off", "0")
