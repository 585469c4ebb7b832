"""Fine-tuning: weights from another checkpoint, a head adapted to other labels, and frozen stages."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from carnelian_training import checkpoint
from carnelian_training.config import Config
from carnelian_training.config_errors import ConfigError, listed
from carnelian_training.ctc.spelling import quote
from carnelian_training.language_models.config import LanguageModelConfig
from carnelian_training.models.masked import MaskedBatchNorm
from carnelian_training.run_config import RunConfig, model_differences
from carnelian_training.weight_files import CheckpointError

logger = logging.getLogger(__name__)


def start_from_checkpoint(model: nn.Module, config: RunConfig) -> None:
    """Load the weights of `config.init.checkpoint`, if it is set, into a new network; log what was loaded.

    The body must be the same. In the head, the blank and the labels that both alphabets have keep their rows: shared
    letters mostly share their sounds, and a network that knows when to write a blank aligns from the first step. A new
    label gets the mean of the old labels' rows. A random row would score above the others, because a trained head gives
    a low score to every label that it does not hear. With other `head_frames`, each output frame gets the rows of the
    old head's output frame at the same time. A language model loads everything, its tokenizer included.

    Raises:
        CheckpointError: The file cannot be read, or its body is different; the message lists what differs in `model`
            or `pretraining`, and the tensors that do not fit.
        ConfigError: `loop.batch_statistics` is `frozen`, but `init.checkpoint` is not set.
    """
    path = config.init.checkpoint
    if path is None:
        if config.loop.batch_statistics == "frozen":
            raise ConfigError("`loop.batch_statistics: frozen` must come with `init.checkpoint`, which has them")
        return
    source, content = checkpoint.load(path)
    if source.model.name != config.model.name:
        raise CheckpointError(
            f"`init.checkpoint` must be of a {config.model.name}, as `model.name` says, but {path} is of a "
            f"{source.model.name}: choose another one, or leave `model`, `labels` and `features` to it"
        )
    if isinstance(config, LanguageModelConfig) or isinstance(source, LanguageModelConfig):
        _load_language_model(model, path, content["weights"], _differences(source, config))
        return
    found: dict[str, Tensor] = content["weights"]
    wanted = model.state_dict()
    has_new_head = source.pretraining is not None and config.pretraining is None
    if has_new_head:  # a pre-trained network has none: the random one stays, as if it were the checkpoint's
        found = _with_new_head(found, wanted)
        source = replace(source, labels=config.labels)
    _check_fits(path, wanted, found, _differences(source, config))
    if source.features != config.features:
        logger.warning("`features` differ from those that %s was trained with: %s", path, source.features)
    weights = {
        name: _adapt_head(wanted[name], tensor, config, source) if _is_head(name) else tensor
        for name, tensor in found.items()
    }
    model.load_state_dict(weights)  # converts float16 to the model's float32
    kept = [label for label in config.labels if label in source.labels]
    if has_new_head:
        rest = "a new head"
    elif source.pretraining is not None:
        rest = "what only pre-training has"
    else:
        rest = f"the head's rows of the blank and {len(kept)} labels"
    logger.info("starting from %s: the body, with %s", path, rest)
    _log_labels(config.labels, source.labels)


def _load_language_model(
    model: nn.Module, path: Path, weights: Mapping[str, Tensor], differences: Sequence[str]
) -> None:
    # The extra state is the tokenizer, which may have any length.
    parameters = {name: tensor for name, tensor in weights.items() if name != "_extra_state"}
    _check_fits(path, dict(model.named_parameters()), parameters, differences)
    model.load_state_dict(weights)
    logger.info("starting from %s, with its tokens", path)


def _with_new_head(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a pre-trained body with the head of `wanted`, without what is for pre-training only."""
    body = {name: tensor for name, tensor in found.items() if not name.startswith("pretraining.")}
    return body | {name: tensor for name, tensor in wanted.items() if _is_head(name)}


def _log_labels(wanted: Sequence[str], found: Sequence[str]) -> None:
    """Log the labels that the run or the checkpoint alone has."""
    if new := [label for label in wanted if label not in found]:
        logger.info("labels whose rows start at the mean of the old ones: %s", quote("".join(new)))
    if dropped := [label for label in found if label not in wanted]:
        logger.info("labels of the checkpoint that this run does not have: %s", quote("".join(dropped)))


def _is_head(name: str) -> bool:
    return name.startswith("head.")


def _check_fits(
    path: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], differences: Sequence[str]
) -> None:
    """Raise if weights have other shapes than the network; warn if `model` makes them compute something else."""
    if mistakes := _misfits(wanted, found):
        head = f"{path} does not fit this run's network; all but its head must:"
        raise CheckpointError("\n  ".join([head, *differences, *listed(mistakes)]))
    if differences:
        lines = [f"`model` differs from that of {path}, whose weights then compute something else:", *differences]
        logger.warning("\n  ".join(lines))


def _misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """List tensors that are missing, unexpected or of another shape; a head may have other rows, but the same width."""
    misfits = [f"{name}: not there" for name in sorted(wanted.keys() - found.keys()) if not _is_head(name)]
    misfits += [f"{name}: not in this model" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        parts = slice(1, None) if _is_head(name) else slice(None)
        if wanted[name].shape[parts] != found[name].shape[parts]:
            misfits.append(f"{name}: must be {list(wanted[name].shape)}, but is {list(found[name].shape)}")
    return misfits


def _differences(source: RunConfig, config: RunConfig) -> list[str]:
    """List the fields of `model` and `pretraining` that differ in the checkpoint, except those of the head."""
    return [
        f"`{key}` is {ours!r}, in the checkpoint {theirs!r}"
        for key, (ours, theirs) in model_differences(config, source).items()
        if "head_frames" not in key
    ]


def _adapt_head(fresh: Tensor, trained: Tensor, config: Config, source: Config) -> Tensor:
    """Adapt a trained head's weight or bias, [head_frames * (labels + 1), ...], to other labels or head frames.

    Args:
        fresh: the new head's tensor, which gives shape and type.
        trained: the checkpoint's tensor.
        config: the new run.
        source: the checkpoint's run.
    """
    head = fresh.clone().view(config.model.head_frames, len(config.labels) + 1, *fresh.shape[1:])
    old = trained.to(fresh).view(source.model.head_frames, len(source.labels) + 1, *fresh.shape[1:])
    rows = [(i, source.labels.index(label)) for i, label in enumerate(config.labels) if label in source.labels]
    new = [i for i, label in enumerate(config.labels) if label not in source.labels]
    to, of = (list(column) for column in zip(*rows, (len(config.labels), len(source.labels)), strict=True))
    for frame in range(len(head)):
        rows_then = old[frame * len(old) // len(head)]
        head[frame, to] = rows_then[of]
        head[frame, new] = rows_then[:-1].mean(dim=0)
    return head.flatten(0, 1)


def frozen_stages(config: RunConfig, step: int) -> frozenset[int]:
    """Return the stages that are frozen at `step`."""
    frozen: set[int] = set()
    for freeze in config.init.freeze:
        if freeze.until_step is None or step < freeze.until_step:
            frozen.update(range(config.model.num_stages) if freeze.stages == "body" else freeze.stages)
    return frozenset(frozen)


def freeze(model: nn.Module, config: RunConfig, step: int) -> frozenset[int]:
    """Freeze the parameters and batch-norm statistics of the stages frozen at `step`, and return these stages.

    `model` is in training mode.
    """
    frozen = frozen_stages(config, step)
    if config.init.freeze:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(config.model.stage_of(name) not in frozen)
    if config.init.freeze or config.loop.batch_statistics == "frozen":
        for name, module in model.named_modules():
            if isinstance(module, MaskedBatchNorm):
                is_frozen = config.loop.batch_statistics == "frozen" or config.model.stage_of(name) in frozen
                module.train(not is_frozen)
    return frozen
