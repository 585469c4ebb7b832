"""Files of weights, anyone's: what is refused before PyTorch reads them, and why it could not."""

import io
import re
import zipfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""How PyTorch's files begin; the second, those of before PyTorch 1.6."""
MAX_TIMES_PACKED = 20
"""How much larger than its file what a file holds may be: trained weights hardly compress."""
SMALL = 1 << 20
"""Bytes that may be packed into any file."""
_POINTER = b"version https://git-lfs.github.com/"


class CheckpointError(ValueError):
    """A file holds no weights that can be used, or does not fit its own configuration."""


def check_holds_weights(path: Path) -> None:
    """Refuse what PyTorch would run, and the few lines that Git leaves in a file's place where Git LFS is missing.

    Raises:
        CheckpointError: The file is a program, or holds those lines.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:  # by a path, PyTorch opens UTF-8 alone
        start = file.read(len(_POINTER))
        is_program = start.startswith(ZIP) and _is_program(file)
    if start == _POINTER:
        raise CheckpointError(f"{path} must hold weights, but is a pointer of Git LFS: fetch them, `git lfs pull`")
    if is_program:
        raise CheckpointError(
            f"{path} must hold weights, but is a TorchScript program, which is never run here: give the checkpoint "
            "that it was made of"
        )


def check_unpacked_size(path: Path, unpacked: int, packed: int) -> None:
    """Refuse what would take the memory: a few megabytes can be packed zeros by the gigabyte.

    Args:
        path: opens the message.
        unpacked: bytes, all in all.
        packed: bytes of the file.

    Raises:
        CheckpointError: It would.
    """
    if unpacked > max(SMALL, MAX_TIMES_PACKED * packed):
        raise CheckpointError(
            f"{path} must hold at most {MAX_TIMES_PACKED} times its size, which trained weights never come near, but "
            f"holds {unpacked:,} bytes in {packed:,}"
        )


def check_undamaged(path: Path, part: IO[bytes] | None = None) -> None:
    """Refuse a file of PyTorch's in which something does not have its checksum; `torch.load` compares none.

    Args:
        path: of the file; those from before PyTorch 1.6 have no checksums.
        part: the file, where `path` is an archive that holds it; it is closed.

    Raises:
        CheckpointError: It is damaged, the message names what is; or it is far larger unpacked.
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
                has_checksums = any(entry.CRC for entry in archive.infolist())  # PyTorch can be told to write none
                damaged = archive.testzip() if has_checksums else None
        except CheckpointError:
            raise
        except Exception as error:  # it names no common base for what damage raises
            raise CheckpointError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} does not have its checksum")


def _is_program(archive: IO[bytes]) -> bool:
    """As `torch.load` finds out, which would hand a program to `torch.jit.load`: that runs its `__setstate__`."""
    archive.seek(0)
    try:
        return "constants.pkl" in torch._C.PyTorchFileReader(archive).get_all_records()
    except (RuntimeError, UnicodeDecodeError, OSError):  # cut, or damaged where it names its parts
        return False


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity, which a whole file may hold that was written by a run gone wrong."""
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def torch_reason(error: Exception) -> str:
    """What PyTorch could not read, without its advice, which is to run what the file says."""
    found = re.search(r"WeightsUnpickler error:\s*(.+?)(?:\. Please|$)", str(error), re.MULTILINE)
    reason = found[1] if found else str(error) or type(error).__name__
    if isinstance(error, KeyError) or re.fullmatch(r"Unsupported operand \d+|\d+", reason):  # a byte for a command
        return "it is no file of PyTorch's"
    return reason
