"""Files that are written whole or not at all."""

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and make its folder if needed; its permissions stay as they were.

    A stream, such as /dev/stdout, gets the content after what it holds (see `is_stream`).

    Raises:
        OSError: The file could not be written, and is as it was before; the message names it.
    """
    content = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        place = _behind(path)
        with open(place, "wb", closefd=isinstance(place, Path)) as stream:
            stream.write(content)
        return
    target = path.resolve()
    partial = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        try:
            if mode is not None:
                partial.touch(0o600)  # nobody else may read the new content before it is in place
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                if mode is not None:
                    partial.chmod(mode)
                os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{path} could not be written, and is as it was before: {error.strerror}") from error


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
