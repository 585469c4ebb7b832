"""The languages of a folder of Hugging Face `transformers`, of which one is read, as `load_adapter` does.

Each language has a vocabulary, and a file with adapters and a head that replace those in the model's weights.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.foreign.huggingface_folder import read_if_there, read_json
from carnelian_training.foreign.options import Options
from carnelian_training.weight_files import CheckpointError

_ADAPTER = re.compile(r"adapter\.(.+)\.(?:safetensors|bin)")


@dataclass(frozen=True)
class Language:
    """The vocabulary and the adapters of one language."""

    tokens: Options
    """Each token's row in the head."""
    adapter: Path | None
    """The file of the language's adapters and head; None: they are in the model's weights."""


def choose_language(path: Path, wanted: str | None, *, has_adapters: bool) -> Language:
    """Return the wanted language of a folder, or its only one.

    A language is there if it has a vocabulary (when `vocab.json` is of several languages) and weights: its own file, or
    the model's weights, which are of the `target_lang` in `tokenizer_config.json`.

    Args:
        path: the folder.
        wanted: the folder's name of the language, mostly three letters (ISO 639-3); None: the only one.
        has_adapters: whether the model has adapters; without them, files of adapters are ignored.

    Raises:
        CheckpointError: The wanted language is not there, or there are several and none is wanted; the message names
            all.
    """
    if not (path / "vocab.json").exists():
        raise CheckpointError(
            f"{path} must hold vocab.json, but has none: copy it and tokenizer_config.json of the model's processor "
            "there (`processor.save_pretrained`)"
        )
    tokens = read_json(path / "vocab.json")
    vocabularies = {name: rows for name, rows in tokens.items() if isinstance(rows, dict)}
    found = sorted(path.iterdir()) if has_adapters else []
    # If a language has both files, the last one is taken, .safetensors, as in transformers.
    files = {match[1]: file for file in found if (match := _ADAPTER.fullmatch(file.name))}
    own = read_if_there(path / "tokenizer_config.json").get("target_lang")
    if own is None and len(vocabularies) == 1:
        own = next(iter(vocabularies))
    named = sorted(files.keys() | ({own} if own is not None else set()))
    there = [name for name in named if not vocabularies or name in vocabularies]
    if wanted is not None and wanted not in there:
        raise CheckpointError(
            f"{path} must have the language {wanted!r}, but has {', '.join(there) or 'one without a name'}: a further "
            "one needs its vocabulary in vocab.json, and adapter.LANGUAGE.safetensors or .bin"
        )
    if wanted is None and len(there) > 1:
        raise CheckpointError(
            f"{path} must be read for one of its {len(there)} languages: choose with `carnelian-train import "
            f"--language`, of {', '.join(there)}"
        )
    if vocabularies and not there:
        raise CheckpointError(
            f"{path} must say in tokenizer_config.json of which language its weights are (`target_lang`), one of "
            f"{', '.join(vocabularies)} as in vocab.json, but says {own!r}"
        )
    if not there:
        return Language(tokens, None)
    name = wanted or there[0]
    return Language(vocabularies.get(name, tokens), files.get(name))
