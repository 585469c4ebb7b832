"""How far a command is with its clips: a bar on a terminal; elsewhere, for example in a batch job, log lines."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


@contextmanager
def clip_progress(
    total: int, desc: str = "", *, is_shown: bool = True, leave: bool = True
) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of clips that are newly done.

    Args:
        total: the number of clips.
        desc: what stands before the numbers, for example the manifest's name.
        is_shown: False shows nothing, for all processes but one.
        leave: whether the bar stays on the terminal when all is done.
    """
    if not is_shown or (sys.stderr and not sys.stderr.closed and sys.stderr.isatty()):
        with tqdm(total=total, desc=desc, unit="clip", leave=leave, disable=not is_shown) as bar:
            yield bar.update
        return
    done, logged_s = 0, time.monotonic()

    def update(newly_done: int) -> None:
        nonlocal done, logged_s
        done += newly_done
        if (now_s := time.monotonic()) - logged_s >= LOG_EVERY_S:
            logger.info("%s%d of %d clips", f"{desc}: " if desc else "", done, total)
            logged_s = now_s

    yield update
