"""Reading of PyTorch's files of weights from any source: checks before, and reasons why one cannot be read."""

import io
import re
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from carnelian_training.config_errors import shown

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""The first bytes of PyTorch's files: a zip archive or, before PyTorch 1.6, a pickle."""
MAX_TIMES_PACKED = 20
"""The largest ratio of unpacked to packed size; trained weights hardly compress."""
SMALL = 1 << 20
"""The unpacked size in bytes that is always allowed, whatever the ratio."""
_POINTER = b"version https://git-lfs.github.com/"


class CheckpointError(ValueError):
    """A file has no usable weights, or does not fit its own configuration."""


def check_holds_weights(path: Path) -> None:
    """Check that a file is no TorchScript program, which PyTorch would run, and is not in the place of the weights.

    Such are pointers of Git LFS, web pages, and zip archives of other files than PyTorch's.

    Raises:
        CheckpointError: The file is one of these.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:  # given a path, PyTorch opens only names in UTF-8
        start = file.read(len(_POINTER))
        is_zip = start.startswith(ZIP)
        members = _other_members(file) if is_zip else []
        is_program = is_zip and _is_program(file)
    if start == _POINTER:
        raise CheckpointError(f"{path} must hold weights, but is a pointer of Git LFS: fetch them, `git lfs pull`")
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(f"{path} must hold weights, but is a web page: download the file that it stands for")
    if members:
        raise CheckpointError(
            f"{path} must hold weights, but is a zip archive of other files: unzip it first; it holds {shown(members)}"
        )
    if is_program:
        raise CheckpointError(
            f"{path} must hold weights, but is a TorchScript program, which is never run here: give the checkpoint "
            "that it was made of"
        )


def check_unpacked_size(path: Path, unpacked: int, packed: int) -> None:
    """Check that a file does not fill the memory when unpacked: a few megabytes can hold gigabytes of zeros.

    `packed` is the size of the file. Sizes are in bytes.

    Raises:
        CheckpointError: The unpacked size is above `SMALL` and more than `MAX_TIMES_PACKED` times the file's size.
    """
    if unpacked > max(SMALL, MAX_TIMES_PACKED * packed):
        raise CheckpointError(
            f"{path} must hold at most {MAX_TIMES_PACKED} times its size, which trained weights never come near, but "
            f"holds {unpacked:,} bytes in {packed:,}"
        )


def check_undamaged(path: Path, part: IO[bytes] | None = None) -> None:
    """Check the checksums of a PyTorch file, which `torch.load` does not do.

    Args:
        path: the file; files from before PyTorch 1.6 have no checksums.
        part: the opened file, if `path` is an archive that contains it; it is closed.

    Raises:
        CheckpointError: The file is damaged, and the message names the damaged part; or it is far larger unpacked.
    """
    if part is None and not path.is_file():
        return
    with part or path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:
            return
        packed = file.seek(0, io.SEEK_END)
        try:
            with zipfile.ZipFile(file) as archive:
                check_unpacked_size(path, sum(entry.file_size for entry in archive.infolist()), packed)
                has_checksums = any(entry.CRC for entry in archive.infolist())  # PyTorch can write files without
                damaged = archive.testzip() if has_checksums else None
        except CheckpointError:
            raise
        except Exception as error:  # `zipfile` has no common base for errors of damage
            raise CheckpointError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} does not have its checksum")


def load_torch(file: IO[bytes], **options: Any) -> Any:
    """Load an open file on the CPU as `torch.load` does, unless it is in PyTorch's first format, a tar archive.

    `torch.load` would unpack such an archive to disk, and before PyTorch 2.6 run code of it, whatever the options are.

    Raises:
        ValueError: The file is a tar archive, or none of PyTorch's.
        Exception: PyTorch cannot read the file; its exceptions have no common base. :func:`torch_reason` says why.
    """
    start = file.read(len(ZIP))
    file.seek(0)
    if start != ZIP:
        # In Python 3.10, `next` seeks before the beginning of zeros alone.
        with suppress(tarfile.TarError, OSError), tarfile.open(fileobj=file, mode="r:") as archive:
            if archive.next():  # whose name may start as a pickle does; zeros alone are an archive without members
                raise ValueError("it is a tar archive, as .nemo files are")
        if not start.startswith(PICKLE):
            raise ValueError("it is no file of PyTorch's")
        file.seek(0)
    return torch.load(file, map_location="cpu", **options)


def _other_members(archive: IO[bytes]) -> list[str]:
    """Return the names of the members of a zip archive that PyTorch has not written; none if it has, or is damaged."""
    archive.seek(0)
    with suppress(Exception), zipfile.ZipFile(archive) as found:  # `zipfile` has no common base for errors of damage
        names = found.namelist()
        return [] if any(name.endswith("/data.pkl") for name in names) else names
    return []


def _is_program(archive: IO[bytes]) -> bool:
    """Return whether `torch.load` would pass the file to `torch.jit.load`, which runs the program's `__setstate__`."""
    archive.seek(0)
    try:
        return "constants.pkl" in torch._C.PyTorchFileReader(archive).get_all_records()
    except (RuntimeError, UnicodeDecodeError, OSError):  # truncated, or its directory is damaged
        return False


def torch_reason(error: Exception) -> str:
    """Return PyTorch's reason for not reading a file, without its advice to load it without safety."""
    if code := re.search(r"GLOBAL (\S+) whose module \S+ is blocked", str(error)):
        return f"it holds code ({code[1]}), which is never run"
    found = re.search(r"WeightsUnpickler error:\s*(.+?)(?:\. Please|$)", str(error), re.MULTILINE)
    reason = found[1] if found else str(error) or type(error).__name__
    if isinstance(error, KeyError) or re.fullmatch(r"Unsupported operand \d+|\d+", reason):  # a byte read as an opcode
        return "it is no file of PyTorch's"
    return reason
