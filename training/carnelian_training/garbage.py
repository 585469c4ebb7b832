"""What training spares Python's garbage collector: millions of clips and planned items, which last and hold no cycles.

It looked at them for nothing, again and again. Without it, reading a million lines took a third less, and planning them
took half as long.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_AT_FIRST = gc.get_freeze_count()  # Python 3.12 itself freezes some hundred objects


@contextmanager
def lasting() -> Iterator[None]:
    """Spare the garbage collector the objects that are made inside, while they are made and later."""
    was_enabled = gc.isenabled()
    gc.collect()  # what is frozen as garbage would never be freed
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def thawed() -> Iterator[None]:
    """Give the garbage collector back what was frozen inside: also all that the caller had, cycles among it.

    If the caller had frozen objects, all stay frozen.
    """
    was_frozen = gc.get_freeze_count() > _FROZEN_AT_FIRST
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
