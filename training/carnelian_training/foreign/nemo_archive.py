"""The archives of NeMo's `.nemo` files: tar, compressed or not, of `model_config.yaml` and `model_weights.ckpt`."""

import io
import lzma
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch
import yaml
from torch import Tensor

from carnelian_training import strict_yaml
from carnelian_training.foreign.options import Options
from carnelian_training.replacement import replaced
from carnelian_training.weight_files import (
    PICKLE,
    SMALL,
    ZIP,
    CheckpointError,
    check_undamaged,
    check_unpacked_size,
    load_torch,
    torch_reason,
)

if TYPE_CHECKING:
    from typing_extensions import Self

CONFIG_FILE, WEIGHTS_FILE = "model_config.yaml", "model_weights.ckpt"
FOLLOW_LINKS = ("--dereference", "--hard-dereference")
"""The options with which `tar` packs files in the place of links to them."""
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
"""The first bytes of gzip, bzip2 and xz."""
_UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
"""What `tarfile` raises for a damaged archive or another file; `OSError` is from bzip2."""


class _Header(tarfile.TarInfo):
    """A header that must be small unless it is a file's: `tarfile` reads other content (long names) into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "Self":
        header = super().frombuf(buf, encoding, errors)
        if header.type not in tarfile.REGULAR_TYPES and header.size > SMALL:
            raise tarfile.ReadError(f"a header has {header.size:,} bytes")
        return header


def _open(path: Path) -> tarfile.TarFile:
    """Open a tar archive, compressed or not."""
    with path.open("rb") as file:
        is_packed = file.read(6).startswith(_PACKED)
    # `tarfile` would try all compressions, and LZMA reads zeros for a minute a GB.
    return tarfile.open(path, "r:*" if is_packed else "r:", tarinfo=_Header)


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar archive, compressed or not, that has a member: zeros alone have none."""
    try:
        with _open(path) as archive:
            return archive.next() is not None
    except _UNREADABLE:
        return False


def read(path: Path) -> tuple[Options, dict[str, Tensor]]:
    """Read NeMo's configuration and the tensors of a `.nemo` file, without unpacking it to disk or loading its classes.

    As in NeMo, members in folders do not count.

    Raises:
        CheckpointError: The file is not such an archive, is far larger unpacked, or does not have both parts once.
    """
    parts: dict[str, bytes] = {}
    unpacked = 0
    try:
        packed = path.stat().st_size
        with _open(path) as archive:
            for member in archive:
                unpacked += member.size
                check_unpacked_size(path, unpacked, packed)
                name = str(PurePosixPath(member.name))  # without the ./ before it
                if name in (CONFIG_FILE, WEIGHTS_FILE):
                    if name in parts:
                        raise CheckpointError(f"{path} must hold {name} once, but holds it twice")
                    if not member.isreg():  # `tarfile` would follow a link, to no member or to itself
                        raise CheckpointError(
                            f"{path}: {name} must be a regular file, but is a link or the like: unpack the archive and "
                            f"pack it again with `tar {' '.join(FOLLOW_LINKS)}`"
                        )
                    file = archive.extractfile(member)
                    assert isinstance(file, io.BufferedReader)
                    if name == WEIGHTS_FILE and not file.peek(len(ZIP)).startswith((ZIP, PICKLE)):
                        raise CheckpointError(f"{path}: {WEIGHTS_FILE} must be a file of PyTorch's, but is none")
                    parts[name] = file.read()
    except _UNREADABLE as error:
        if getattr(error, "errno", None) is not None:
            raise
        why = str(error).partition(":\n")[0]  # if it is no archive, a line for each compression would follow
        raise CheckpointError(f"{path} must be a whole tar archive, as .nemo files are, but is not: {why}") from error
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in parts:
            raise CheckpointError(f"{path} must hold {name} at its root, but does not")
    check_undamaged(path, io.BytesIO(parts[WEIGHTS_FILE]))
    try:
        tree = strict_yaml.load(parts[CONFIG_FILE], unique_keys=False)
        tensors = load_torch(io.BytesIO(parts[WEIGHTS_FILE]), weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {torch_reason(error)}") from error
    if isinstance(tree, dict) and "encoder" not in tree:
        tree = tree.get("model", tree)
    if not isinstance(tree, dict) or not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: {CONFIG_FILE} and {WEIGHTS_FILE} must hold mappings, but do not")
    return tree, tensors


def write(path: Path, tree: Options, tensors: dict[str, Tensor]) -> None:
    """Write a `.nemo` file of NeMo's configuration and tensors."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    parts = {
        CONFIG_FILE: yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode(),
        WEIGHTS_FILE: buffer.getvalue(),
    }
    with replaced(path) as partial, tarfile.open(partial, "w") as archive:
        for name, content in parts.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
