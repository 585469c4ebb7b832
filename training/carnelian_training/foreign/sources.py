"""Reading any checkpoint, Carnelian's or another toolkit's, as a configuration and weights of Carnelian."""

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training import checkpoint
from carnelian_training.config import Config, config_from_dict
from carnelian_training.config_tree import apply_overrides
from carnelian_training.foreign import dle, fairseq, huggingface, nemo, nemo_archive, unpickling
from carnelian_training.foreign.options import Options
from carnelian_training.foreign.tensors import plain_tensors
from carnelian_training.models.network import CtcNetwork
from carnelian_training.weight_files import CheckpointError, check_holds_weights

Weights = Callable[[Config], dict[str, Tensor]]
"""A function that returns the weights of a network of a configuration."""


def read(
    path: Path,
    name: str | None = None,
    *,
    dle_config: Path | None = None,
    is_raw: bool = False,
    labels: Path | None = None,
    language: str | None = None,
    overrides: tuple[str, ...] = (),
) -> tuple[Config, dict[str, Tensor]]:
    """Read a checkpoint of another toolkit: a Hugging Face folder, NeMo's `.nemo` or `.ckpt`, fairseq's or DLE's `.pt`.

    Args:
        path: the file or folder.
        name: name of the configuration; by default from the file's name.
        dle_config: only for DLE: its YAML file, if the checkpoint is not one of the published models.
        is_raw: only for DLE: take the trained weights, not their moving average.
        labels: only for fairseq: the dictionary `dict.ltr.txt`, if it is neither in the file nor LibriSpeech's.
        language: only for Hugging Face: the language to read, if there are several, such as `eng`.
        overrides: ``a.b=value``, changes of the configuration.

    Raises:
        CheckpointError: The checkpoint cannot be read, has options that Carnelian does not support, or tensors that do
            not fit.
        ConfigError: The resulting configuration is wrong; the message lists every mistake.
    """
    if not path.exists():
        raise CheckpointError(f"{path} must be a checkpoint, but there is no such file")
    check_holds_weights(path)
    tree, weights, taken = _interpret(path, dle_config, is_raw, labels, language)
    given = {"--labels": labels is not None, "--raw": is_raw, "--dle-config": dle_config is not None}
    given["--language"] = language is not None
    if wrong := [option for option, is_given in given.items() if is_given and option not in taken]:
        raise CheckpointError(
            f"{path} must be read without {', '.join(wrong)}: --labels is for recognisers of fairseq, --language "
            "for those of Hugging Face, --raw and --dle-config for Jasper and QuartzNet of DLE"
        )
    # Made absolute, because `.` has no name.
    tree = {"name": name or re.sub(r"\W+", "_", path.absolute().stem.lower()), **tree}
    apply_overrides(tree, overrides)
    config = config_from_dict(tree, str(path))
    checkpoint.check_size(config, str(path))
    return config, weights(config)


def _interpret(
    path: Path, dle_config: Path | None, is_raw: bool, labels: Path | None, language: str | None
) -> tuple[Options, Weights, set[str]]:
    """Return a checkpoint's configuration tree, its weights, and the options of `import` that apply to it."""
    where = str(path)
    weights: Weights
    taken: set[str] = set()
    if path.is_dir():
        if (path / nemo_archive.CONFIG_FILE).exists():
            folder = path.resolve()
            packed = folder.with_name(f"{folder.name}.nemo")
            raise CheckpointError(
                f"{path} must be a .nemo file, but is one taken apart; pack it: "
                f"{shlex.join(['tar', *nemo_archive.FOLLOW_LINKS, '-C', str(folder), '-cf', str(packed), '.'])}"
            )
        if not (path / "config.json").exists():
            # The folder of a run has its weights beside its configuration.
            of_run = [file for file in sorted(path.glob("*.pt")) if file.with_suffix(".yaml").exists()]
            if files := sorted(path.glob("[!.]*.nemo")) or of_run:
                kind = "a run" if files is of_run else "NeMo's"
                raise CheckpointError(
                    f"{path} must be a Hugging Face folder of transformers, but holds {kind}: "
                    f"give {' or '.join(map(str, files))}"
                )
        tree, tensors, alphabet = huggingface.read(path, language)
        taken = set() if alphabet is None else {"--language"}
        weights = partial(huggingface.weights, tensors, alphabet=alphabet, path=path)
    elif path.suffix.lower() == ".nemo" or nemo_archive.is_archive(path):
        theirs, tensors = nemo_archive.read(path)
        tensors = plain_tensors(tensors, path)
        tree = nemo.config_tree(theirs, where)
        weights = partial(nemo.weights, tensors, theirs, path=path)
    elif path.suffix in (".json", ".safetensors") and path.is_file():
        raise CheckpointError(f"{path} must be read with the rest of its Hugging Face folder: give {path.parent}")
    else:
        content = unpickling.load_checkpoint(path)
        if isinstance(content, dict) and "weights" in content:
            raise unpickling.NotForeignError(
                f"{path} must be a checkpoint of another toolkit, but is one of Carnelian already"
            )
        if fairseq.is_fairseq(content):
            content["model"] = plain_tensors(content["model"], path)
            tree, alphabet = fairseq.config_tree(content, labels, where)
            taken = set() if alphabet is None else {"--labels"}
            weights = partial(fairseq.weights, content, alphabet=alphabet, path=path)
        elif nemo.is_training_checkpoint(content):
            tensors = plain_tensors(content["state_dict"], path)
            theirs = nemo.training_options(content, where)
            tree = nemo.config_tree(theirs, where)
            weights = partial(nemo.weights, tensors, theirs, path=path)
        else:
            nemo.check_whole(content, where)
            tensors = dle.tensors(content, is_raw=is_raw, path=path)
            tree = dle.config_tree(tensors, dle_config, where)
            weights = partial(dle.weights, tensors, path=path)
            taken = {"--raw", "--dle-config"}
    return tree, weights, taken


def load_model(path: Path, name: str | None = None) -> tuple[Config, CtcNetwork]:
    """Load any checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: see :func:`read` and :func:`carnelian_training.checkpoint.load_model`.
    """
    if path.suffix.lower() == ".nemo" or path.is_dir():
        return _load_foreign(path, name)
    try:
        return checkpoint.load_model(path)
    except checkpoint.ForeignCheckpointError as error:
        refused = checkpoint.ForeignCheckpointError(*error.args)  # without the causes, which hold all that was read
    with suppress(unpickling.NotForeignError):
        return _load_foreign(path, name)
    raise refused


def _load_foreign(path: Path, name: str | None) -> tuple[Config, CtcNetwork]:
    config, weights = read(path, name)
    with torch.device("meta"):
        model = checkpoint.build_model(config)
    model.load_state_dict(weights, assign=True)
    return config, model.eval()
