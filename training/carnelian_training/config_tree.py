"""Configurations as plain trees of dicts, lists and values: read, override, validate, and convert back."""

from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from carnelian_training import config_errors, strict_yaml
from carnelian_training.config_errors import ConfigError

T = TypeVar("T")


def load_tree(path: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Read the plain tree of a YAML file and apply overrides, without validation.

    Raises:
        ConfigError: The file cannot be read or is not a mapping, or an override cannot be applied.
    """
    try:
        tree = strict_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        if path.suffix not in {".yaml", ".yml"}:  # a manifest or a checkpoint, say
            raise ConfigError(
                f"{path}: cannot be read as YAML; give a training YAML, as those in training/configs/"
            ) from error
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping, but holds {type(tree).__name__}")
    apply_overrides(tree, overrides)
    expanded: dict[str, Any] = _expand_home(tree)
    return expanded


def _expand_home(node: Any) -> Any:
    """Expand `~/` in strings: a shell expands it neither in a file nor after the `=` of an override."""
    if isinstance(node, dict):
        return {key: _expand_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_expand_home(value) for value in node]
    return str(Path(node).expanduser()) if isinstance(node, str) and node.startswith("~/") else node


def apply_overrides(tree: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Apply overrides ``a.b=value`` to a plain tree, in place; ``a.0.b=value`` changes an element of a list.

    Raises:
        ConfigError: An override cannot be read, or its path leads through a value or past the end of a list.
    """
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(f"an override must look like a.b=value, but is {override!r}")
        node: Any = tree
        path = ""
        *parents, leaf = key.split(".")
        for parent in parents:
            place = _place(node, parent, path, override)
            if isinstance(node, dict) and node.get(parent) is None:  # not there, or null: an empty section
                node[parent] = {}
            child = copy(node[place])  # aliases share it
            node[place] = child
            node, path = child, f"{path}.{parent}".lstrip(".")
        place = _place(node, leaf, path, override)
        try:
            node[place] = strict_yaml.load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value cannot be read as YAML: {error}") from error


def _place(node: Any, key: str, path: str, override: str) -> str | int:
    """Return the key in a section, or the index in a list, that `key` of an override means."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ConfigError(f"override {override!r}: `{path}` is a value, not a section")
    if not (key.isdecimal() and int(key) < len(node)):
        raise ConfigError(f"override {override!r}: `{path}` has positions 0 to {len(node) - 1}, but no {key!r}")
    return int(key)


def validated(adapter: TypeAdapter[T], tree: dict[str, Any], where: str, *, tagged: tuple[str, ...] = ()) -> T:
    """Validate a plain tree with a pydantic adapter.

    An error's message begins with `where`. `tagged` names the sections of several kinds, told apart by their `name`.

    Raises:
        ConfigError: The tree is wrong; the message lists each unknown key and wrong value by its path or, if there are
            none, each `true` or `false` in place of a number.
    """
    try:
        config = adapter.validate_python(tree)
    except ValidationError as error:
        raise ConfigError(_listed(where, config_errors.describe(error, tagged))) from error
    # Pydantic takes `true` for 1. Its strict mode would also refuse 1e-3, which YAML reads as a string.
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
    """Convert a configuration to a plain tree, as YAML and JSON can hold it."""
    plain: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return plain


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a plain tree by their dotted paths."""
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
