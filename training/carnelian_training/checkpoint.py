"""Self-describing checkpoints: the weights with the configuration of their run, written atomically."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carnelian_training.config import Config
from carnelian_training.config_errors import listed
from carnelian_training.config_tree import config_to_dict
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.models.jasper import Jasper, JasperConfig
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.pretraining import Wav2Vec2Pretraining
from carnelian_training.models.quartznet import QuartzNet, QuartzNetConfig
from carnelian_training.models.transformer_xl import TransformerXl, TransformerXlConfig
from carnelian_training.models.wav2vec2 import Wav2Vec2
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.replacement import check_apart, replaced
from carnelian_training.run_config import RunConfig, model_differences, run_from_dict
from carnelian_training.tensor_checks import check_fit, find_mistake, is_dense
from carnelian_training.weight_files import (
    CheckpointError,
    check_holds_weights,
    check_undamaged,
    load_torch,
    torch_reason,
)

MOST_LAYERS = 500
"""The largest number of layers of a network to read; published networks have at most a fifth."""
_ADVICE = " (`carnelian-train import` makes one of another toolkit's)"


class ForeignCheckpointError(CheckpointError):
    """The file is no checkpoint of Carnelian; it may be another toolkit's."""


def build_network(config: RunConfig) -> nn.Module:
    """Build a run's network with random weights: a recogniser, wav2vec 2.0 for pre-training, or a language model."""
    if isinstance(config, LanguageModelConfig):
        return TransformerXl(config.model, config.text.vocabulary)
    if config.pretraining is None:
        return build_model(config)
    assert isinstance(config.model, Wav2Vec2Config)
    return Wav2Vec2Pretraining(config.model, config.pretraining)


def build_model(config: Config) -> CtcNetwork:
    """Build the recogniser of a configuration with random weights; the blank is its last label.

    Raises:
        CheckpointError: The configuration is of pre-training, which has no labels.
        TypeError: `config.model` is not of a known network.
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
    if isinstance(config.model, QuartzNetConfig):
        return QuartzNet(config.model, num_labels)
    raise TypeError(
        "`config.model` must be a QuartzNetConfig, JasperConfig or Wav2Vec2Config, but is a "
        f"{type(config.model).__name__}: give `build_model` its network"
    )


def check_size(config: RunConfig, where: str) -> None:
    """Refuse a network that is far too large, before memory is allocated for it; messages begin with `where`.

    Raises:
        CheckpointError: The network has more than `MOST_LAYERS` layers, or one that is too large for PyTorch.
    """
    model = config.model
    if isinstance(model, Wav2Vec2Config):
        count = len(model.conv_channels) + model.layers
    elif isinstance(model, TransformerXlConfig):
        count = model.layers
    else:
        count = sum(stage.blocks * stage.repeat for stage in model.stages)
    if count > MOST_LAYERS:
        raise CheckpointError(f"{where} must describe a network of {MOST_LAYERS} layers at most, but describes {count}")
    try:
        with torch.device("meta"):
            build_network(config)
    except (RuntimeError, TypeError) as error:  # PyTorch raises either for sizes beyond 64 bits
        raise CheckpointError(f"{where} must describe a network of some gigabytes, but: {error}") from error


def save(
    path: Path,
    config: RunConfig,
    weights: dict[str, Tensor],
    *,
    results: dict[str, Any],
    training: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically: a reader sees the old file or the new one, never a part.

    Args:
        path: the file, usually `<name>.pt`; its folder is created.
        config: configuration of the run, stored in the checkpoint.
        weights: the model's state dict.
        results: figures about the weights, for example {"step": 1000, "dev_wer": 0.4}.
        training: the state for resuming, beyond the weights; None in published checkpoints.

    Raises:
        OSError: The file cannot be written, for example because the disk is full; nothing of it is left there.
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
        ForeignCheckpointError: The file is not a Carnelian checkpoint.
        CheckpointError: The file is damaged, lacks a part, has weights that no network has, such as NaN, or describes a
            network that is far too large.
    """
    check_holds_weights(path)
    check_undamaged(path)
    try:
        with path.open("rb") as file:
            content = load_torch(file, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} must be a checkpoint, but there is no such file") from error
    except IsADirectoryError as error:
        raise ForeignCheckpointError(f"{path} must be a checkpoint of Carnelian{_ADVICE}, but is a folder") from error
    except Exception as error:
        raise ForeignCheckpointError(
            f"{path} cannot be read as a checkpoint of Carnelian{_ADVICE}: {torch_reason(error)}"
        ) from error
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int or number != 1:
        is_foreign = not isinstance(content, dict) or "weights" not in content
        kind = ForeignCheckpointError if is_foreign else CheckpointError
        raise kind(f"{path} must be a checkpoint of Carnelian{_ADVICE}, but is not of format 1")
    _check_parts(path, content)
    check_fit([mistake for name, t in content["weights"].items() if (mistake := _find_mistake(name, t))], path)
    config = run_from_dict(content["config"], str(path))
    check_size(config, str(path))
    return config, content


def _check_parts(path: Path, content: dict[str, Any]) -> None:
    for part in ("config", "weights", "results"):
        if not isinstance(content.get(part), dict):
            raise CheckpointError(f"{path} must hold all parts of a checkpoint, but its `{part}` is no dictionary")
    for name, tensor in content["weights"].items():
        if not isinstance(name, str) or not is_dense(tensor):
            raise CheckpointError(f"{path} must hold dense tensors by name, but its `weights` are not, {name!r} first")


def _find_mistake(name: str, tensor: Tensor) -> str | None:
    if name != "_extra_state":
        return find_mistake(name, tensor, list(tensor.shape))
    if tensor.ndim != 1 or tensor.dtype != torch.uint8:
        return f"  {name}: must be bytes, but is {list(tensor.shape)} of {tensor.dtype}".replace("torch.", "")
    return None


def load_model(path: Path) -> tuple[Config, CtcNetwork]:
    """Read a recogniser's checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: The checkpoint cannot be read (see :func:`load`), is not of a recogniser, or has missing or
            unexpected tensors, or tensors of another shape; the message names each.
    """
    config, content = load(path)
    if isinstance(config, LanguageModelConfig):
        raise CheckpointError(
            f"{path} must be a recogniser, but is a language model: `carnelian-train perplexity` rates it, "
            "`carnelian-export --out` writes it for rescoring"
        )
    with torch.device("meta"):
        model = build_model(config)
    _fill(model, content["weights"], path)
    return config, model.eval()


def load_language_model(path: Path) -> tuple[LanguageModelConfig, TransformerXl]:
    """Read a language model's checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: The checkpoint cannot be read (see :func:`load`), is not of a language model, or has missing or
            unexpected tensors, or tensors of another shape; the message names each.
    """
    config, content = load(path)
    if not isinstance(config, LanguageModelConfig):
        raise CheckpointError(
            f"{path} must be a language model, but is a recogniser, `model.name: {config.model.name}`"
        )
    with torch.device("meta"):
        model = TransformerXl(config.model, config.text.vocabulary)
    _fill(model, content["weights"], path)
    return config, model.eval()


def _fill(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    own = model.state_dict()
    weights = {name: t.detach().to(own[name].dtype) if name in own else t for name, t in weights.items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own configuration: {error}") from error


def publish(source: Path, target: Path) -> None:
    """Write a copy of a checkpoint without the state for resuming, with tensors in float16.

    A tensor with a value above 65504, which float16 cannot hold, keeps its type.

    Raises:
        CheckpointError: `source` cannot be read (see :func:`load`).
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

    If the checkpoints lie in one basin of the loss, the mean often has fewer errors than each of them (stochastic
    weight averaging, Izmailov et al. 2018). This holds for checkpoints of one run, and of runs that each continue
    another.

    Args:
        sources: at least two different files; a file given twice counts twice. The last one gives the configuration.
        target: the file to write, in float32 and without the state for resuming.

    Raises:
        CheckpointError: There are fewer than two files, or one differs from the last in labels, features, text,
            tokens, in what `model` computes, or in a tensor's shape.
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
        ours, theirs = content["weights"], more["weights"]
        if not differences and not torch.equal(_tokens(ours), _tokens(theirs)):
            differences = ["its tokens"]
        if not differences:  # otherwise these already explain why tensors differ
            differences = sorted({name for name, _ in _shapes(ours) ^ _shapes(theirs)})
        if differences:
            named = ", ".join(listed(differences))
            raise CheckpointError(f"{path} must be of the same network as {sources[-1]}, but differs in {named}")
        for name, tensor in sums.items():
            tensor += theirs[name]
    means = {name: (tensor / len(sources)).float() for name, tensor in sums.items()}
    save(target, config, content["weights"] | means, results={"average_of": [path.name for path in sources]})


def _tokens(weights: dict[str, Tensor]) -> Tensor:
    """Return a language model's tokenizer, [bytes] uint8; nothing of a recogniser."""
    return weights.get("_extra_state", torch.empty(0))


def _shapes(weights: dict[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(tensor.shape)) for name, tensor in weights.items()}
