"""Checks of fields of a configuration; each raises ValueError with what must hold and what was found."""

import math
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator


def _check_given(path: Any) -> Any:
    if path == "":
        raise ValueError("a path must not be empty; the working directory is .")
    return path


GivenPath = Annotated[Path, BeforeValidator(_check_given)]
"""A path that is not the empty string, which `Path` would make the working directory."""


def _check(config: object, names: tuple[str, ...], holds: Callable[[Any], bool], must: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise ValueError(f"`{name}` must {must}, but is {value:,}")


def check_positive(config: object, *names: str) -> None:
    """Check that the named fields are above 0 and finite, or None."""
    _check(config, names, lambda value: 0 < value < math.inf, "be positive and finite")


def check_not_negative(config: object, *names: str) -> None:
    """Check that the named fields are at least 0 and finite, or None."""
    _check(config, names, lambda value: 0 <= value < math.inf, "be finite and at least 0")


def check_at_least_one(config: object, *names: str) -> None:
    """Check that the named integer fields are from 1 to 2^31 - 1, or None."""
    _check(config, names, lambda value: value >= 1, "be at least 1")
    check_at_most(config, 2**31 - 1, *names)


def check_at_most(config: object, most: int, *names: str) -> None:
    """Check that the named integer fields are at most `most`, above which they would only use memory, or None."""
    _check(config, names, lambda value: value <= most, f"be at most {most:,}")


def check_below_one(config: object, *names: str) -> None:
    """Check that the named fields are at least 0 and below 1, as probabilities of dropout must be."""
    _check(config, names, lambda value: 0 <= value < 1, "be at least 0 and below 1")


def check_probability(config: object, *names: str) -> None:
    """Check that the named fields are from 0 to 1."""
    _check(config, names, lambda value: 0 <= value <= 1, "be within 0 to 1")


def check_range(name: str, found: tuple[float, float], lowest: float, highest: float) -> None:
    """Check that `found`, the field `name`, is a lower and an upper end within `lowest` to `highest`."""
    if not lowest <= found[0] <= found[1] <= highest:
        raise ValueError(f"`{name}` must be a range within {lowest} to {highest}, but is {found[0]} to {found[1]}")


def check_no_controls(name: str, characters: Iterable[str], what_to_do: str = "") -> None:
    """Check that there are no control characters or lone surrogates, which neither texts nor file names may have."""
    if controls := [each for each in characters if unicodedata.category(each) in ("Cc", "Cs")]:
        raise ValueError(
            f"`{name}` must have no control characters or lone surrogates, but has "
            f"{', '.join(map(ascii, controls[:10]))}{what_to_do}"
        )
