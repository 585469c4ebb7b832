"""The configuration of a run of either kind, a recogniser or a language model, which `model.name` decides.

What a configuration leaves out of `model`, `labels` and `features` comes from the checkpoint in `init.checkpoint`.
"""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from carnelian_training.config import Config, check_suits_network, config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict, flat, load_tree, validated
from carnelian_training.distributed import is_first
from carnelian_training.features import FeatureSettings
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.models.pretraining import PretrainingConfig
from carnelian_training.models.transformer_xl import TransformerXlConfig

logger = logging.getLogger(__name__)

RunConfig = Config | LanguageModelConfig
"""The configuration of any run of the training loop."""

OF_TRAINING = ("dropout", "layer_drop", "extractor_gradient")
"""The endings of the names of `model` fields that only training uses: they do not change a trained network's output."""

SIZES_OF_PRETRAINING = tuple(f"pretraining.{name}" for name in ("groups", "codes", "code_width", "width"))
"""The fields of `pretraining` that set the shapes of weights; the other fields do not."""

_ADAPTER = TypeAdapter(with_config(ConfigDict(extra="forbid"))(LanguageModelConfig))


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a recogniser's configuration; see :func:`load_run`.

    Raises:
        ConfigError: The configuration is wrong, or is a language model's.
    """
    config = load_run(path, overrides)
    if isinstance(config, LanguageModelConfig):
        raise ConfigError(
            f"{path} must be of a recogniser, but is of a language model, `model.name: {config.model.name}`"
        )
    return config


def load_run(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file, and apply ``a.b=value`` overrides to its tree before validation.

    Raises:
        ConfigError: The configuration is wrong; the message lists each unknown key and wrong value by its path.
    """
    tree = load_tree(path, overrides)
    _inherit(tree)
    config = run_from_dict(tree, str(path))
    if isinstance(config, Config):
        check_suits_network(config, str(path))
    warmup, steps = config.optimizer.warmup_steps, config.loop.steps
    if warmup > steps and is_first():
        logger.warning(
            "`optimizer.warmup_steps` should be at most `loop.steps`, %d, but is %d: the learning rate will stay below "
            "`optimizer.lr`, %g; lower it",
            steps,
            warmup,
            config.optimizer.lr,
        )
    return config


def _inherit(tree: dict[str, Any]) -> None:
    """Fill in missing parts of `model`, `labels` and `features` from the checkpoint in `init.checkpoint`, in place.

    A section without `name`, and `pretraining`, changes single fields of the checkpoint's section; a section with
    `name` replaces it. A tree without `pretraining` is of fine-tuning and gets none.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The tree changes a stage that the checkpoint does not have, or is a recogniser's and the checkpoint
            a language model's.
    """
    init = tree.get("init")
    path = init.get("checkpoint") if isinstance(init, dict) else None
    if isinstance(path, str) and path and not _is_whole(tree):  # the empty one is refused later, by its key
        from carnelian_training.checkpoint import load  # which itself imports this module

        source = config_to_dict(load(Path(path))[0])
        wanted = tree.get("model")
        if isinstance(wanted, dict) and wanted.get("name", source["model"]["name"]) != source["model"]["name"]:
            return  # `loop/finetune.py` reports the mismatch
        if "text" in source and not (isinstance(wanted, dict) and "name" in wanted):
            of_recognisers = {field.name for field in fields(Config)} - source.keys()
            if given := next((key for key in tree if key in of_recognisers), None):
                raise ConfigError(
                    f"`init.checkpoint` must be of a recogniser, as `{given}` says, but {path} is of a "
                    f"{source['model']['name']}: choose another one"
                )
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


def run_from_dict(tree: dict[str, Any], where: str) -> RunConfig:
    """Make a configuration of either kind of a plain tree, for example from a checkpoint.

    Raises:
        ConfigError: The tree is wrong; the message begins with `where` and lists each unknown key and wrong value.
    """
    model = tree.get("model")
    if isinstance(model, dict) and model.get("name") == TransformerXlConfig.name:
        return validated(_ADAPTER, tree, where)
    return config_from_dict(tree, where)


def model_differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields that make two networks compute different results: dotted path -> both values.

    These are the fields of `model`, and the sizes in `pretraining` if both have it.
    """
    ours, theirs = (flat(config_to_dict(config)) for config in (one, other))
    keys = [key for key in ours | theirs if key.startswith("model.") and not key.endswith(OF_TRAINING)]
    keys += [key for key in SIZES_OF_PRETRAINING if key in ours and key in theirs]
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}
