"""The errors that pydantic finds in a configuration, described in terms of its YAML file."""

import reprlib
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

WORDS = {
    "unexpected_keyword_argument": "unknown key",
    "missing": "must be given",
    "tuple_type": "must be a list",
    "string_type": "must be text, in quotes where YAML takes it for something else",
    "dataclass_type": "must be a section of `key: value`",
    "model_attributes_type": "must be a section of `key: value`",
    "union_tag_not_found": "`name` must be given",
}

MAX_SHOWN = 200
"""The most characters of a value in a message."""
MAX_LISTED = 10
"""The most items of a list in a message, which only counts the others."""
_SHORT = reprlib.Repr()  # limits depth and size, because YAML aliases can repeat a value billions of times
_SHORT.maxlevel = 3
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 40
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every mistake with its path."""


def shown(value: object) -> str:
    """Return a value as Python writes it, shortened to fit into a message."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def listed(items: Sequence[str]) -> list[str]:
    """Return the items of a list to write in a message; where there are others, the last one says how many."""
    more = len(items) - MAX_LISTED
    return [*items[:MAX_LISTED], f"and {more} more"] if more > 0 else list(items)


def describe(error: ValidationError, tagged: tuple[str, ...]) -> list[str]:
    """Describe each mistake in a line: its path, what must hold and, unless it is a whole section, what was found.

    `tagged` names the sections of several kinds, told apart by their `name`.
    """
    return [f"{_path(mistake['loc'], tagged)}: {_words(mistake)}" for mistake in error.errors()]


def _words(mistake: ErrorDetails) -> str:
    words = WORDS.get(mistake["type"], mistake["msg"].removeprefix("Value error, "))
    return words if isinstance(mistake["input"], dict) else f"{words} (found {shown(mistake['input'])})"


def _path(location: tuple[int | str, ...], tagged: tuple[str, ...]) -> str:
    """Return the dotted path in the file, without the kind of a tagged section, which pydantic inserts."""
    if location and location[0] in tagged:
        location = (location[0], *location[2:])
    return ".".join(map(str, location)) or "config"
