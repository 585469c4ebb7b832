"""Checks of the numbers in a configuration: each raises a ValueError with what must hold and what was found."""

import math


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


def check_probability(name: str, found: float) -> None:
    """A probability."""
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"`{name}` must be within 0 to 1, but is {found}")


def check_range(name: str, found: tuple[float, float], lowest: float, highest: float) -> None:
    """A lower and an upper end, within limits."""
    if not lowest <= found[0] <= found[1] <= highest:
        raise ValueError(f"`{name}` must be a range within {lowest} to {highest}, but is {found[0]} to {found[1]}")
