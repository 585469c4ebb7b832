"""Download of large files: interrupted downloads are resumed, and checksums are verified."""

import hashlib
import http.client
import io
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from carnelian_training.replacement import WriteError, written

BLOCK_BYTES = 1 << 20
TIMEOUT_S = 60
ATTEMPTS = 5
"""The most attempts in a row without new bytes, each after a longer pause than the one before."""


def download(url: str, target: Path, md5: str, stop: threading.Event) -> None:
    """Fetch a file, starting where an earlier attempt stopped; an existing file is only verified.

    The bytes are written to `<target>.partial`, which is renamed to `target` when its checksum is right. `md5` is in
    hexadecimal. Another thread can end the download by setting `stop`.

    Raises:
        OSError: The server refuses or stops answering, or the disk is full; the partial file stays for the next
            attempt.
        ValueError: The checksum is wrong; if the file was just fetched, it is removed.
        CancelledError: `stop` was set; the partial file stays.
    """
    if target.exists():
        _check(target, md5, stop)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    _fetch(url, partial, stop)
    try:
        _check(partial, md5, stop)
    except ValueError:
        partial.unlink()
        raise
    partial.rename(target)


def _fetch(url: str, partial: Path, stop: threading.Event) -> None:
    failures = 0
    with tqdm(unit="B", unit_scale=True, desc=partial.stem, disable=None) as progress:
        while True:
            if stop.is_set():
                raise CancelledError
            before = _size(partial)
            try:
                if _append(url, partial, progress, stop):
                    return
                problem = "the connection ended early"
            except urllib.error.HTTPError as error:
                error.close()  # the error is also an open response
                if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return  # the file seems complete; the checksum will show
                if error.code < 500:
                    raise OSError(f"{url}: the server answers {error.code} {error.reason}") from error
                problem = str(error)
            except WriteError:  # the disk, not the server
                raise
            except (OSError, http.client.HTTPException) as error:
                problem = str(error)
            failures = 0 if _size(partial) > before else failures + 1
            if failures == ATTEMPTS:
                message = f"{url}: gave up after {ATTEMPTS} attempts that brought nothing: {problem}"
                raise OSError(f"{message}. Run the command again to go on from byte {_size(partial)}.")
            stop.wait(2**failures if failures else 0)


def _append(url: str, partial: Path, progress: tqdm, stop: threading.Event) -> bool:  # type: ignore[type-arg]
    """Request the missing bytes and append them; return False if the connection ended before the file was complete."""
    start = _size(partial)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        # A server that cannot resume answers 200 and sends the whole file.
        start = start if response.status == http.client.PARTIAL_CONTENT else 0
        announced = response.headers.get("Content-Length")
        total = start + int(announced) if announced else None
        progress.reset(total)
        progress.update(start)
        with ExitStack() as closing:
            with written(partial):
                file = closing.enter_context(partial.open("ab" if start else "wb"))
            for block in _blocks(response, stop):
                with written(partial, ", and keeps what it has"):
                    file.write(block)
                    file.flush()
                progress.update(len(block))
    return total is None or _size(partial) == total


def _check(path: Path, md5: str, stop: threading.Event) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        for block in _blocks(file, stop):
            digest.update(block)
    if digest.hexdigest() != md5:
        raise ValueError(f"{path} must have the MD5 {md5}, but has {digest.hexdigest()}: fetch it again")


def _blocks(file: http.client.HTTPResponse | io.BufferedReader, stop: threading.Event) -> Iterator[bytes]:
    while block := file.read1(BLOCK_BYTES):  # returns what has arrived: a slow server takes long for a block
        if stop.is_set():
            raise CancelledError
        yield block


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
