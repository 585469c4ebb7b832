"""Checkpoints that describe themselves: the weights with the configuration that made them, written atomically."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carnelian_training.config import Config
from carnelian_training.config_tree import config_to_dict
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.models.jasper import Jasper, JasperConfig
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.pretraining import Wav2Vec2Pretraining
from carnelian_training.models.quartznet import QuartzNet
from carnelian_training.models.transformer_xl import TransformerXl
from carnelian_training.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
from carnelian_training.replacement import check_apart, replaced
from carnelian_training.run_config import RunConfig, model_differences, run_from_dict
from carnelian_training.weight_files import (
    CheckpointError,
    check_holds_weights,
    check_undamaged,
    is_finite,
    torch_reason,
)

MOST_NAMED = 10
"""Tensors or fields that do not fit; the others are counted."""
_ADVICE = " (`carnelian-train import` makes one of another toolkit's)"


def build_network(config: RunConfig) -> nn.Module:
    """What a configuration trains, with random weights: a recogniser, wav2vec 2.0 in pre-training, a language model."""
    if isinstance(config, LanguageModelConfig):
        return TransformerXl(config.model, config.text.vocabulary)
    if config.pretraining is None:
        return build_model(config)
    assert isinstance(config.model, Wav2Vec2Config)
    return Wav2Vec2Pretraining(config.model, config.pretraining)


def build_model(config: Config) -> CtcNetwork:
    """The recogniser of a configuration, with random weights; the blank is its last label.

    Raises:
        CheckpointError: It is one of pre-training, which knows no labels.
    """
    if config.pretraining is not None:
        raise CheckpointError(
            f"{config.name} must be a recogniser, but was pre-trained and knows no letters yet: fine-tune it with "
            "`init.checkpoint` first"
        )
    num_labels = len(config.labels) + 1
    if isinstance(config.model, JasperConfig):
        return Jasper(config.model, num_labels)
    if isinstance(config.model, Wav2Vec2Config):
        return Wav2Vec2(config.model, num_labels)
    return QuartzNet(config.model, num_labels)


def save(
    path: Path,
    config: RunConfig,
    weights: dict[str, Tensor],
    *,
    results: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint; a reader sees the old file or the new one, never half of one.

    Args:
        path: usually `<name>.pt`; its folder is made.
        config: stored inside.
        weights: the model's state dict.
        results: what is known about it, for example {"step": 1000, "dev_wer": 0.4}.
        training: what resuming needs beyond the weights; left out of published checkpoints.

    Raises:
        OSError: It cannot be written, for want of room for example; nothing of it is left on the disk.
    """
    content = {
        "format": 1,
        "config": config_to_dict(config),
        "weights": weights,
        "results": results,
        "training": training,
    }
    with replaced(path) as partial, partial.open("wb") as file:
        torch.save(content, file)


def load(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Read a checkpoint: its configuration and its whole content (`weights`, `results`, `training`).

    Raises:
        CheckpointError: The file cannot be read, is not a checkpoint of ours, lacks a part, or holds weights that are
            not finite.
    """
    check_holds_weights(path)
    check_undamaged(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} must be a checkpoint, but there is no such file") from error
    except Exception as error:  # torch names no common base for what a damaged file raises
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of Carnelian{_ADVICE}: {torch_reason(error)}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise CheckpointError(f"{path} must be a checkpoint of Carnelian{_ADVICE}, but is not of format 1")
    _check_parts(path, content)
    if broken := [name for name, tensor in content["weights"].items() if not is_finite(tensor)]:
        raise CheckpointError(f"{path} must hold finite weights, but {len(broken)} tensor(s) do not, {broken[0]} first")
    return run_from_dict(content["config"], str(path)), content


def _check_parts(path: Path, content: dict[str, Any]) -> None:
    for part in ("config", "weights", "results"):
        if not isinstance(content.get(part), dict):
            raise CheckpointError(f"{path} must hold all parts of a checkpoint, but its `{part}` is no dictionary")
    for name, tensor in content["weights"].items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} must hold tensors by name, but its `weights` are not, {name!r} first")


def load_model(path: Path) -> tuple[Config, CtcNetwork]:
    """Read a recogniser's checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: as :func:`load`, or it is no recogniser, or tensors are missing, unexpected or misshapen; each
            is named.
    """
    config, content = load(path)
    if isinstance(config, LanguageModelConfig):
        raise CheckpointError(
            f"{path} must be a recogniser, but is a language model: `carnelian-train perplexity` rates it, "
            "`carnelian-export --out` writes it for rescoring"
        )
    model = build_model(config)
    _fill(model, content["weights"], path)
    return config, model.eval()


def load_language_model(path: Path) -> tuple[LanguageModelConfig, TransformerXl]:
    """Read a language model's checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: as :func:`load_model`, of a recogniser.
    """
    config, content = load(path)
    if not isinstance(config, LanguageModelConfig):
        raise CheckpointError(
            f"{path} must be a language model, but is a recogniser, `model.name: {config.model.name}`"
        )
    model = TransformerXl(config.model, config.text.vocabulary)
    _fill(model, content["weights"], path)
    return config, model.eval()


def _fill(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in weights.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own configuration: {error}") from error


def publish(source: Path, target: Path) -> None:
    """Strip what only resuming needs and halve the weights to float16, batch-norm statistics included.

    A tensor with a value that float16 cannot hold, above 65504, stays as it is.

    Raises:
        CheckpointError: as :func:`load`.
        ValueError: `target` is `source`.
    """
    check_apart(target, source)
    config, content = load(source)
    weights = {}
    for name, tensor in content["weights"].items():
        half = tensor.half() if tensor.is_floating_point() else tensor
        weights[name] = half if half.isfinite().all() else tensor
    save(target, config, weights, results=content["results"])


def average(sources: Sequence[Path], target: Path) -> None:
    """Write the mean of the weights of several checkpoints of one network, batch-norm statistics included.

    Where they lie in one basin, as the checkpoints of a run do and the ends of runs that each began at the one before,
    the mean errs less than any of them (stochastic weight averaging, Izmailov et al. 2018).

    Args:
        sources: at least two files; one that comes twice counts twice. The configuration is taken from the last one.
        target: in float32, without what resuming needs.

    Raises:
        CheckpointError: There are fewer, or one differs from the last in labels, features, text, what `model` computes
            or a tensor's shape.
        ValueError: `target` is one of them.
    """
    if len(sources) < 2:
        raise CheckpointError(f"an average must be of two checkpoints or more, found {len(sources)}")
    if len({path.resolve() for path in sources}) < 2:
        raise CheckpointError(f"an average must be of two files or more, but {sources[0]} is the only one")
    check_apart(target, *sources)
    config, content = load(sources[-1])
    sums = {name: tensor.double() for name, tensor in content["weights"].items() if tensor.is_floating_point()}
    for path in sources[:-1]:
        other, more = load(path)
        differences = [
            *(key for key in ("labels", "features", "text") if getattr(other, key, None) != getattr(config, key, None)),
            *sorted(model_differences(other, config)),
        ]
        if not differences:  # else they say why tensors differ
            differences = sorted({name for name, _ in _shapes(content["weights"]) ^ _shapes(more["weights"])})
        if differences:
            named = ", ".join(differences[:MOST_NAMED])
            named += f" and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
            raise CheckpointError(f"{path} must be of the same network as {sources[-1]}, but differs in {named}")
        for name, tensor in sums.items():
            tensor += more["weights"][name]
    means = {name: (tensor / len(sources)).float() for name, tensor in sums.items()}
    save(target, config, content["weights"] | means, results={"average_of": [path.name for path in sources]})


def _shapes(weights: dict[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(tensor.shape)) for name, tensor in weights.items()}
