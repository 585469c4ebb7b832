"""Any checkpoint, ours or another toolkit's, as a configuration and weights of ours."""

import re
from pathlib import Path

import torch
from torch import Tensor

from carnelian_training import checkpoint
from carnelian_training.checkpoint import CheckpointError
from carnelian_training.config import Config, apply_overrides, config_from_dict
from carnelian_training.foreign import dle, nemo
from carnelian_training.models.network import CtcNetwork


def read(
    path: Path,
    name: str | None = None,
    *,
    dle_config: Path | None = None,
    is_raw: bool = False,
    overrides: tuple[str, ...] = (),
) -> tuple[Config, dict[str, Tensor]]:
    """Read a checkpoint of another toolkit: a `.nemo` file, else a `.pt` of DLE.

    Args:
        path: the file.
        name: of the configuration; the file's own by default.
        dle_config: DLE's YAML, if the file is its and not of a published form.
        is_raw: of DLE: the weights as trained, not their moving average.
        overrides: ``a.b=value``, over what the file says.

    Raises:
        CheckpointError: It cannot be read, has options that ours have not, or tensors that do not fit.
        ConfigError: What it describes is no network of ours; every mistake is named.
    """
    where = str(path)
    is_nemo = path.suffix == ".nemo"
    if is_nemo:
        theirs, tensors = nemo.read(path)
        tree = nemo.config_tree(theirs, where)
    else:
        content = dle.load(path)
        if isinstance(content, dict) and "weights" in content:
            raise CheckpointError(f"{path} must be a checkpoint of another toolkit, but is one of Carnelian already")
        tensors = dle.tensors(content, is_raw=is_raw, where=where)
        tree = dle.config_tree(tensors, dle_config, where)
    tree = {"name": name or re.sub(r"\W+", "_", path.stem.lower()), **tree}
    apply_overrides(tree, overrides)
    config = config_from_dict(tree, where)
    return config, (nemo if is_nemo else dle).weights(tensors, config, path)


def load_model(path: Path, name: str | None = None) -> tuple[Config, CtcNetwork]:
    """Any checkpoint for inference: float32 weights, evaluation mode.

    Raises:
        CheckpointError: as :func:`read` and :func:`carnelian_training.checkpoint.load_model`.
    """
    if is_ours(path):
        return checkpoint.load_model(path)
    config, weights = read(path, name)
    with torch.device("meta"):
        model = checkpoint.build_model(config)
    model.load_state_dict(weights, assign=True)
    return config, model.eval()


def is_ours(path: Path) -> bool:
    """Whether a file is a checkpoint of Carnelian; a file that cannot be read is said to be."""
    if path.suffix == ".nemo":
        return False
    try:
        content = dle.load(path)
    except CheckpointError:
        return True  # whose reader says what is wrong with it
    return not isinstance(content, dict) or "state_dict" not in content
