"""Configurations as plain trees, as YAML and JSON hold them: read, overridden, validated."""

from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from carnelian_training import config_errors, strict_yaml
from carnelian_training.config_errors import ConfigError

T = TypeVar("T")


def load_tree(path: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The plain tree of a YAML file with its overrides, not validated.

    Raises:
        ConfigError: The file cannot be read or is not a mapping, or an override cannot be applied.
    """
    try:
        tree = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping, but holds {type(tree).__name__}")
    apply_overrides(tree, overrides)
    expanded: dict[str, Any] = _expand_home(tree)
    return expanded


def _expand_home(node: Any) -> Any:
    """Paths in the home folder, which a shell expands neither in a file nor behind the `=` of an override."""
    if isinstance(node, dict):
        return {key: _expand_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_expand_home(value) for value in node]
    return str(Path(node).expanduser()) if isinstance(node, str) and node.startswith("~/") else node


def apply_overrides(tree: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Set ``a.b=value`` in a plain tree; of a list, ``a.0.b=value``.

    Raises:
        ConfigError: An override cannot be read, or its place is no section.
    """
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"an override must look like a.b=value, but is {override!r}")
        node: Any = tree
        path = ""
        *parents, leaf = key.split(".")
        for parent in parents:
            place = _place(node, parent, path, override)
            child = copy(node.setdefault(parent, {}) if isinstance(node, dict) else node[place])  # YAML's `*` shares it
            node[place] = child
            node, path = child, f"{path}.{parent}".lstrip(".")
        place = _place(node, leaf, path, override)
        try:
            node[place] = strict_yaml.load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value cannot be read as YAML: {error}") from error


def _place(node: Any, key: str, path: str, override: str) -> str | int:
    """Where a section or a list has what an override calls `key`."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ConfigError(f"override {override!r}: `{path}` is a value, not a section")
    if not (key.isdecimal() and int(key) < len(node)):
        raise ConfigError(f"override {override!r}: `{path}` has positions 0 to {len(node) - 1}, but no {key!r}")
    return int(key)


def validated(adapter: TypeAdapter[T], tree: dict[str, Any], where: str, *, tagged: tuple[str, ...] = ()) -> T:
    """Validate a plain tree with a pydantic adapter.

    Args:
        adapter: of the configuration's class.
        tree: as YAML gives it.
        where: opens the message of an error.
        tagged: sections of which there are several kinds, told apart by their `name`.

    Raises:
        ConfigError: with every unknown key and wrong value, by path; where there is none, with every `true` for a
            number.
    """
    try:
        config = adapter.validate_python(tree)
    except ValidationError as error:
        raise ConfigError(_listed(where, config_errors.describe(error, tagged))) from error
    # To pydantic, `true` is 1; its strict mode would refuse 1e-3 as well, which is a string to YAML.
    values = flat(config_to_dict(config))
    misplaced = {
        path: found for path, found in flat(tree).items() if isinstance(found, bool) and values[path] is not found
    }
    if misplaced:
        raise ConfigError(_listed(where, [f"{path}: must be a number (found {misplaced[path]})" for path in misplaced]))
    return config


def _listed(where: str, mistakes: list[str]) -> str:
    return "\n".join([f"{where}: {len(mistakes)} mistake(s)", *(f"  {line}" for line in mistakes)])


def config_to_dict(config: object) -> dict[str, Any]:
    """The plain tree of a configuration, as YAML and JSON can hold it."""
    plain: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return plain


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a plain tree by their dotted paths."""
    if isinstance(tree, dict):
        children = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        children = [(str(i), value) for i, value in enumerate(tree)]
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in children:
        leaves |= flat(value, f"{path}.{key}" if path else key)
    return leaves
