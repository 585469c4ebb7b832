"""Checks of the numbers in a configuration: each raises a ValueError with what must hold and what was found."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator


def _check_given(path: Any) -> Any:
    if path == "":
        raise ValueError("a path must not be empty; the working directory is .")
    return path


GivenPath = Annotated[Path, BeforeValidator(_check_given)]
"""Not "", which to Path is the working directory."""


def check_positive(config: object, *names: str) -> None:
    """Finite fields that must be above 0, where they are given."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive and finite, but is {value}")


def check_not_negative(config: object, *names: str) -> None:
    """Finite fields that must be 0 or more."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must be finite and at least 0, but is {value}")


def check_at_least_one(config: object, *names: str) -> None:
    """Whole fields that must be 1 or more, where they are given, and that 32 bits can hold."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not value >= 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}")
        check_at_most(config, 2**31 - 1, name)


def check_at_most(config: object, most: int, *names: str) -> None:
    """Whole fields that would only cost memory beyond a number."""
    for name in names:
        value = getattr(config, name)
        if value > most:
            raise ValueError(f"`{name}` must be at most {most:,}, but is {value:,}")


def check_below_one(config: object, *names: str) -> None:
    """Fields from 0 to less than 1, such as the shares that dropout leaves out."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` must be at least 0 and below 1, but is {value}")


def check_probability(config: object, *names: str) -> None:
    """Fields from 0 to 1."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` must be within 0 to 1, but is {value}")


def check_range(name: str, found: tuple[float, float], lowest: float, highest: float) -> None:
    """A lower and an upper end, within limits."""
    if not lowest <= found[0] <= found[1] <= highest:
        raise ValueError(f"`{name}` must be a range within {lowest} to {highest}, but is {found[0]} to {found[1]}")
