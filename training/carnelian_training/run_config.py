"""The configuration of a run of either kind, a recogniser or a language model, which `model.name` decides."""

import logging
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from carnelian_training.config import Config, check_all_used, config_from_dict
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict, flat, load_tree, validated
from carnelian_training.distributed import is_first
from carnelian_training.inheritance import inherit
from carnelian_training.language_models.config import LanguageModelConfig
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
    inherit(tree)
    config = run_from_dict(tree, str(path))
    if isinstance(config, Config):
        check_all_used(config, str(path))
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
