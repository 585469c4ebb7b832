"""Atomic writing of files, with errors that name the file, and a check that no source is overwritten."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class WriteError(OSError):
    """A file could not be written, for example because the disk is full; the message names it and says its state."""


def check_apart(target: Path, *sources: Path | None) -> None:
    """Check that a target does not overwrite one of the files that it is made from; None is ignored.

    Raises:
        ValueError: The target is one of the sources.
    """
    for source in sources:
        if source is not None and source.resolve() == target.resolve():
            raise ValueError(f"the target must be another file than the source, which would be lost, but is {source}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a path to write to; the file replaces `path` when the context ends without an error.

    A reader of `path` sees the old file or the new one, never a part. Its folder is created. A symbolic link stays a
    link, and something other than a file, such as /dev/stdout, is written to directly.

    Raises:
        WriteError: The file could not be written; `path` is unchanged, and the partial file is removed.
    """
    if path.exists() and not path.is_file():
        with written(path):
            yield path
        return
    target = path.resolve()
    partial = target.with_name(f".{os.getpid()}.{target.name}")  # the same suffix, which many libraries read
    with written(path, ", and is as it was before"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # otherwise a power failure could leave an empty file under the new name
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def written(path: Path, state: str = "") -> Iterator[None]:
    """Name `path` in errors of the context that writes it: an error of a full disk does not say which file it is.

    Args:
        path: the file that the context writes.
        state: the state of the file after an error, for the message.

    Raises:
        WriteError: The file could not be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # On a full disk, PyTorch raises an error about an unexpected position; the system's error is its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        reason = (cause.filename is None and cause.strerror) or cause
        raise WriteError(f"{path} could not be written{state}: {reason}") from error
