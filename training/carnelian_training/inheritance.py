"""Fields of a configuration that are taken from the checkpoint in `init.checkpoint`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.features import FeatureSettings
from carnelian_training.models.pretraining import PretrainingConfig


def inherit(tree: dict[str, Any]) -> None:
    """Fill in missing parts of `model`, `labels` and `features` from the checkpoint in `init.checkpoint`, in place.

    A section without `name`, and `pretraining`, changes single fields of the checkpoint's section; a section with
    `name` replaces it. A tree without `pretraining` is of fine-tuning and gets none.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The tree changes a stage that the checkpoint does not have.
    """
    init = tree.get("init")
    if isinstance(init, dict) and isinstance(init.get("checkpoint"), str) and not _is_whole(tree):
        from carnelian_training.checkpoint import load  # which itself imports this module, through `run_config`

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
    """Return whether a tree needs nothing from a checkpoint.

    This is so for a run's own resolved YAML file, so that a run can be resumed when `init.checkpoint` is gone.
    """
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
    """Return a plain tree with changes; a list, such as `model.stages`, is changed by a mapping from positions."""
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
