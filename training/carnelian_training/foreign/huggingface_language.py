"""The languages of a folder of Hugging Face's `transformers`, of which one is read, as `load_adapter` does.

Each has a vocabulary, and a file of its adapters and head that take the place of those in the model's weights.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from carnelian_training.foreign.huggingface_alphabet import read_if_there, read_json
from carnelian_training.foreign.options import Options
from carnelian_training.weight_files import CheckpointError

_ADAPTER = re.compile(r"adapter\.(.+)\.(?:safetensors|bin)")


@dataclass(frozen=True)
class Language:
    """What one language has of its own."""

    tokens: Options
    """Each token's row of the head."""
    adapter: Path | None
    """The file of its adapters and head; None: those in the model's weights."""


def choose_language(path: Path, wanted: str | None, *, has_adapters: bool) -> Language:
    """The wanted language of a folder, or the only one.

    Those that are there have a vocabulary, if `vocab.json` is of several, and weights: a file of their own, or the
    model's, which are of the `target_lang` that `tokenizer_config.json` names.

    Args:
        path: the folder.
        wanted: as the folder calls it, mostly by three letters (ISO 639-3).
        has_adapters: whether the model has any; without them no file of adapters counts.

    Raises:
        CheckpointError: The wanted language is not there, or there are several and none is wanted: all are named.
    """
    tokens = read_json(path / "vocab.json")
    vocabularies = {name: rows for name, rows in tokens.items() if isinstance(rows, dict)}
    found = sorted(path.iterdir()) if has_adapters else []
    # Of two files of a language the last one counts, the safetensors, as there.
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
