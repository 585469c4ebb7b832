"""Configurations as plain trees, as YAML and JSON hold them: read, overridden, laid over a checkpoint's, validated."""

from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from carnelian_training import config_errors, strict_yaml
from carnelian_training.config_errors import ConfigError
from carnelian_training.features import FeatureSettings
from carnelian_training.models.pretraining import PretrainingConfig

T = TypeVar("T")


def load_tree(path: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The plain tree of a YAML file with its overrides, not validated.

    Raises:
        ConfigError: The file is not a mapping, or an override cannot be applied.
    """
    try:
        tree = strict_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a mapping, but holds {type(tree).__name__}")
    apply_overrides(tree, overrides)
    try:
        expanded: dict[str, Any] = _expand_home(tree)
    except RecursionError as error:
        raise ConfigError(f"{path}: no anchor (&) may hold its own alias (*), but one does") from error
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


def inherit(tree: dict[str, Any]) -> None:
    """Fill in what a YAML leaves out of `model`, `labels` and `features` from its `init.checkpoint`, in place.

    A section without its `name` is laid over the checkpoint's, as is `pretraining`; one with its `name` stands alone.
    A YAML without `pretraining` is of a fine-tuning and gets none.

    Raises:
        CheckpointError: `init.checkpoint` cannot be read.
        ConfigError: The YAML names a stage that the checkpoint does not have.
    """
    init = tree.get("init")
    if isinstance(init, dict) and isinstance(init.get("checkpoint"), str) and not _is_whole(tree):
        from carnelian_training.checkpoint import load  # which needs this module

        source = config_to_dict(load(Path(init["checkpoint"]))[0])
        wanted = tree.get("model")
        if isinstance(wanted, dict) and wanted.get("name", source["model"]["name"]) != source["model"]["name"]:
            return  # `loop/finetune.py` reports the mismatch
        sections = {"model", "labels", "features"} - ({"labels"} if source.get("pretraining") else set())
        for section in sections & source.keys():
            if section not in tree:
                tree[section] = source[section]
            elif isinstance(tree[section], dict) and "name" not in tree[section]:
                tree[section] = _laid_over(source[section], tree[section], section)
        if isinstance(tree.get("pretraining"), dict) and source.get("pretraining"):
            tree["pretraining"] = source["pretraining"] | tree["pretraining"]
        if "text" in source and isinstance(text := tree.setdefault("text", {}), dict):
            for key in ("tokens", "labels"):
                text.setdefault(key, source["text"].get(key))


def _is_whole(tree: dict[str, Any]) -> bool:
    """Whether nothing is left to a checkpoint, as in a run's own YAML, which goes on where that file is gone."""
    model, features, text, pretraining = (tree.get(key) for key in ("model", "features", "text", "pretraining"))
    if not (isinstance(model, dict) and "name" in model):
        return False
    if isinstance(text, dict):
        return {"tokens", "labels"} <= text.keys()
    if isinstance(pretraining, dict) and not {field.name for field in fields(PretrainingConfig)} <= pretraining.keys():
        return False
    log_mel = {field.name for field in fields(FeatureSettings)}
    return "labels" in tree and isinstance(features, dict) and ("name" in features or log_mel <= features.keys())


def _laid_over(node: Any, changes: Any, path: str) -> Any:
    """A plain tree with changes; those of a list, such as `model.stages`, are a mapping from positions."""
    if isinstance(node, dict) and isinstance(changes, dict):
        return node | {key: _laid_over(node.get(key), value, f"{path}.{key}") for key, value in changes.items()}
    if isinstance(node, list) and isinstance(changes, dict):
        positions = {str(i): i for i in range(len(node))}
        if absent := [key for key in changes if str(key) not in positions]:
            raise ConfigError(
                f"`{path}` of the checkpoint has positions 0 to {len(node) - 1}, but these are given: {absent}"
            )
        changed = list(node)
        for key, value in changes.items():
            i = positions[str(key)]
            changed[i] = _laid_over(node[i], value, f"{path}.{key}")
        return changed
    return changes


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
