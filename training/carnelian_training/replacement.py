"""Atomic writing of files, with errors that name the file, and a check that no source is overwritten."""

import os
import secrets
import shutil
import stat
import tempfile
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

    A reader of `path` sees the old file or the new one, never a part. Its folder is created, and its permissions stay
    as they were. A symbolic link stays a link. A stream, such as /dev/stdout, gets the whole content after what it
    holds (see `is_stream`).

    Raises:
        WriteError: The file could not be written; `path` is unchanged, and the partial file is removed.
    """
    if is_stream(path):
        with written(path), tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, path.name)
            yield whole
            place = _behind(path)
            with whole.open("rb") as file, open(place, "wb", closefd=isinstance(place, Path)) as stream:
                shutil.copyfileobj(file, stream)
        return
    target = path.resolve()
    # Random, because two machines may have the same process number. The same suffix, which many libraries read.
    partial = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    with written(path, ", and is as it was before"):
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        try:
            if mode is not None:
                partial.touch(0o600)  # nobody else may read the new content before it is in place
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # otherwise a power failure could leave an empty file under the new name
            if mode is not None:
                partial.chmod(mode)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def remove_partials(folder: Path, *patterns: str) -> None:
    """Remove what killed processes left of files that they replaced, whose names match a pattern of `glob`.

    No other process may write such files there meanwhile.
    """
    for pattern in patterns:
        for partial in folder.glob(f".{'[0-9a-f]' * 16}.{pattern}"):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8; see :func:`replaced`."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


def is_stream(path: Path) -> bool:
    """Return whether a path is a device or a pipe, or names an open file, as /dev/stdout does after `> log.txt`."""
    return path.exists() and (not path.is_file() or not isinstance(_behind(path), Path))


def _behind(path: Path) -> int | Path:
    """Return the descriptor of the open file that a path such as /dev/stdout names; otherwise the path itself."""
    numbered, link = Path("/proc/self/fd").resolve(), path
    while link.is_symlink():
        if link.parent.resolve() == numbered:
            return int(link.name)
        link = link.parent / link.readlink()
    return path


@contextmanager
def written(path: Path, state: str = "") -> Iterator[None]:
    """Name `path` in errors of the context that writes it: an error of a full disk does not say which file it is.

    `state` says in the message what the file is like after an error.

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
        reason = (cause.filename is None and cause.strerror) or str(cause).removeprefix(f"[Errno {cause.errno}] ")
        raise WriteError(f"{path} could not be written{state}: {reason}") from error
