"""Fetches a model repository: python3 download.py URL SHA256 FOLDER. Runs in an init container, on Python alone.

Nothing is unpacked unless the archive's SHA-256 matches. FOLDER/.sha256 is written last, so that a container that
was restarted in between begins anew, and one that finds it has nothing to do. The environment variable AUTHORIZATION,
if set, is sent as the header Authorization.
"""

import errno
import hashlib
import http.client
import lzma
import os
import shutil
import sys
import tarfile
import time
import urllib.request
import zlib
from pathlib import Path

ATTEMPTS = 4
TIMEOUT_S = 60
BLOCK_BYTES = 1 << 20
PASSING = (408, 425, 429)
"""HTTP statuses below 500 after which another attempt may succeed."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch(url: str, archive: Path) -> str:
    """Downloads `url` to the file `archive` and returns its SHA-256 in hexadecimal."""
    request = urllib.request.Request(url)
    if authorization := os.environ.get("AUTHORIZATION", "").strip():  # a Secret made of a file often ends in a newline
        if not (authorization.isascii() and authorization.isprintable()):
            raise SystemExit(
                "download: `authorization` of the Secret must be one line of text, but has other characters"
            )
        # The header is not sent to where a redirect leads: presigned URLs refuse it, and other hosts must not see it.
        request.add_unredirected_header("Authorization", authorization)
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, archive.open("wb") as file:
        announced, received = answer.length, 0
        while block := answer.read(BLOCK_BYTES):
            digest.update(block)
            file.write(block)
            received += len(block)
    if announced is not None and received != announced:
        raise ConnectionError(f"{announced} bytes were announced, {received} came")
    return digest.hexdigest()


def fetch_patiently(url: str, archive: Path) -> str:
    """Calls `fetch` until it succeeds, at most ATTEMPTS times; only errors that may pass are tried again."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return fetch(url, archive)
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in FULL:
                raise
            is_final = 400 <= getattr(error, "code", 0) < 500 and error.code not in PASSING
            if is_final or attempt == ATTEMPTS:
                tried = f"{attempt} attempt{'s' * (attempt > 1)}"
                raise SystemExit(f"download: {url} must be readable, but after {tried}: {error}") from None
            time.sleep(2**attempt)
    raise AssertionError


def main(url: str, sha256: str, folder: Path) -> None:
    """Leaves the archive's content in `folder`, or ends with a message that says what is wrong."""
    try:
        download(url, sha256, folder)
    except getattr(tarfile, "FilterError", ()) as error:
        raise SystemExit(f"download: {url} must have files and folders alone, inside it, but: {error}") from None
    except (OSError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        number = getattr(error, "errno", None)
        if number in FULL:
            raise SystemExit(
                f"download: {folder} must have room for the archive and its content, but: {error}; the node's disk is "
                "full, which `modelRepository.download.size` does not reserve"
            ) from None
        if number is not None:
            raise
        raise SystemExit(f"download: {url} must be a whole tar archive (also .gz or .xz), but: {error}") from None


def download(url: str, sha256: str, folder: Path) -> None:
    """Fetches the archive and unpacks it into `folder`, unless `folder` has its content already."""
    mark = folder / ".sha256"
    if mark.is_file() and mark.read_text() == sha256:
        print(f"download: {folder} holds {sha256} already")
        return
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    archive = folder / ".archive"
    found = fetch_patiently(url, archive)
    if found != sha256:
        archive.unlink()
        raise SystemExit(f"download: {url} must have the SHA-256 {sha256}, but has {found}; nothing was unpacked")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")  # refuses paths and links that lead out of the folder
        else:  # a Python below 3.11.4, such as Debian 12's
            refused = [m.name for m in tar if not (m.isfile() or m.isdir()) or ".." in m.name or m.name.startswith("/")]
            if refused:
                raise SystemExit(f"download: {url} must have files and folders alone, inside it, but has {refused[:3]}")
            tar.extractall(folder)
    archive.unlink()
    models = sorted(path.parent.name for path in folder.glob("*/config.pbtxt"))
    if not models:
        raise SystemExit(f"download: {url} must have model folders at its top, but no */config.pbtxt is there")
    mark.write_text(sha256)
    print(f"download: {folder} has {', '.join(models)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
