"""Files that are there whole or not at all, and not in the place of their sources; errors of writing name the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class WriteError(OSError):
    """A file could not be written, for want of room for example; the message names it and says what became of it."""


def check_apart(target: Path, *sources: Path | None) -> None:
    """Refuse to write over a file what is made of it; None stands for one that was not given.

    Raises:
        ValueError: The target is one of the sources.
    """
    for source in sources:
        if source is not None and source.resolve() == target.resolve():
            raise ValueError(f"the target must be another file than the source, which would be lost, but is {source}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` when this context ends well; its folder is made.

    A reader sees the old file or the new one, never half of one. A symbolic link stays one, and what is no file, such
    as /dev/stdout, is written to as it is.

    Raises:
        WriteError: It could not be written; `path` is as it was, and nothing is beside it.
    """
    if path.exists() and not path.is_file():
        with written(path):
            yield path
        return
    target = path.resolve()
    partial = target.with_name(f".{os.getpid()}.{target.name}")  # ends as it does, which many libraries go by
    with written(path, ", and is as it was before"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def written(path: Path, state: str = "") -> Iterator[None]:
    """Name `path` in errors of this context, which writes it: the system's own do not say which file had no room.

    Args:
        path: what is written.
        state: what became of it, if that is known.

    Raises:
        WriteError: It could not be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Where the disk has no room, PyTorch ends the file at a position that it did not expect, and says only that.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        reason = (cause.filename is None and cause.strerror) or cause
        raise WriteError(f"{path} could not be written{state}: {reason}") from error
