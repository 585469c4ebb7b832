"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and make its folder if needed; append to a device such as /dev/stdout.

    Raises:
        OSError: The file could not be written, and is as it was before; the message names it.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):  # /dev/stdout may be a file
        with path.open("ab") as stream:
            stream.write(content)
        return
    target = path.resolve()
    partial = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{path} could not be written, and is as it was before: {error.strerror}") from error
