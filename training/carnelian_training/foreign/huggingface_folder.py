"""The files of a folder of Hugging Face `transformers`: JSON, and weights in one file or in shards.

Weights come from `model.safetensors` or from `pytorch_model.bin`, whose classes are not unpickled.
"""

import json
from pathlib import Path

from torch import Tensor

from carnelian_training.config_errors import shown
from carnelian_training.foreign.options import Options
from carnelian_training.foreign.tensors import plain_tensors
from carnelian_training.weight_files import (
    CheckpointError,
    check_holds_weights,
    check_undamaged,
    load_torch,
    torch_reason,
)

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INSTEAD = {
    "adapter_config.json": "an adapter alone: merge it first (`merge_and_unload` of peft)",
    "tf_model.h5": "those of TensorFlow alone: save them as safetensors first (`from_tf=True` of transformers 4)",
}
"""Files that tell why a folder has no weights of PyTorch, each with the end of the message."""
KINDS: tuple[tuple[str, tuple[type, ...], tuple[str, ...]], ...] = (
    ("a mapping", (dict,), ("feature_extractor", "audio_processor", "added_tokens_decoder")),
    ("a list", (list,), ("additional_special_tokens",)),
    ("a list or a mapping", (list, dict), ("extra_special_tokens",)),
    ("text", (str,), ("target_lang",)),
    ("a whole number", (int,), ("pad_token_id",)),
    ("true or false", (bool,), ("do_stable_layer_norm", "conv_bias", "apply_spec_augment", "do_lower_case")),
)
"""What these options must be, in any file, unless they are missing or null."""


def read_json(path: Path) -> Options:
    """Read a JSON file of a Hugging Face folder, which must hold a mapping, with options of the right `KINDS`.

    Raises:
        CheckpointError: The file is missing, is not JSON, or does not hold a mapping; or an option is of another kind.
    """
    if not path.exists():
        raise CheckpointError(f"{path.parent} must be a Hugging Face folder, but has no {path.name}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be JSON of a Hugging Face folder, but cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a mapping, but holds {type(found).__name__}")
    for kind, types, names in KINDS:
        for name in names:
            if found.get(name) is not None and type(found[name]) not in types:
                raise CheckpointError(f"{path} must have {kind} as `{name}`, but has {shown(found[name])}")
    return found


def read_if_there(path: Path) -> Options:
    """Read a JSON file as :func:`read_json` does; return an empty mapping if there is no such file."""
    return read_json(path) if path.is_file() else {}


def check_kind_of_weights(path: Path) -> None:
    """Check that a folder without weights of PyTorch does not hold others, such as TensorFlow's, in their place.

    Raises:
        CheckpointError: It does; the message says what can be done.
    """
    if not any(found for name in WEIGHTS for found in path.glob(f"{name}*")):
        for name, what in INSTEAD.items():
            if (path / name).is_file():
                raise CheckpointError(f"{path} must hold a model's weights, but holds {what}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a model from its folder, by name.

    Raises:
        CheckpointError: There is no file of weights, or one cannot be read.
    """
    for name in WEIGHTS:
        if (path / name).is_file():
            return read_weights(path / name)
        index = path / f"{name}.index.json"
        if index.is_file():  # the weights are in shards
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise CheckpointError(f"{index} must hold `weight_map`, each tensor's file, but does not")
            # Only the last part of the path counts, so that a shard outside the folder is never read.
            parts = [read_weights(path / Path(str(file)).name) for file in sorted(set(shards.values()))]
            return {name: tensor for part in parts for name, tensor in part.items()}
    raise CheckpointError(
        f"{path} must hold model.safetensors or pytorch_model.bin, or the `.index.json` of their shards, but has none"
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one file of weights, .safetensors or .bin, by name.

    Raises:
        CheckpointError: The file cannot be read.
    """
    check_holds_weights(path)
    if path.suffix != ".safetensors":
        check_undamaged(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            with path.open("rb") as file:
                found = load_torch(file, weights_only=True)
    except Exception as error:  # neither library has a common base for errors of a damaged file
        raise CheckpointError(f"{path}: its weights cannot be read: {torch_reason(error)}") from error
    return plain_tensors(found, path)
