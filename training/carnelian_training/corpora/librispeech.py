"""LibriSpeech (Panayotov et al. 2015, https://www.openslr.org/12): download, unpack, and write manifests."""

import shutil
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path

import soundfile

from carnelian_training.corpora.download import download
from carnelian_training.data.manifest import Clip, write_manifest
from carnelian_training.lock import locked
from carnelian_training.replacement import written

URL = "https://www.openslr.org/resources"

PARTS = {
    "dev-clean": (12, "42e2234ba48799c1f50f24a7926300a1"),
    "dev-other": (12, "c8d0bcc9cca99d4f8b62fcc847357931"),
    "test-clean": (12, "32fa31d27d2e1cad72775fee3f4849a9"),
    "test-other": (12, "fb5a50374b501bb3bac4815ee91d3135"),
    "train-clean-100": (12, "2a93770f6d5c6c964bc36631d331a522"),
    "train-clean-360": (12, "c0e676e450a7ff2f54aeade5171606fa"),
    "train-other-500": (12, "d1a0fd59409feb2c614ce4d30c387708"),
    "dev-clean-2": (31, "6d7ab67ac6a1d2c993d050e16d61080d"),
    "train-clean-5": (31, "5df7d4e78065366204ca6845bb08f490"),
}
"""For each part, OpenSLR's number of the resource and the MD5 of the archive (from `md5sum.txt`). 31 is Mini
LibriSpeech, half a gigabyte."""

ALL = tuple(part for part, (resource, _) in PARTS.items() if resource == 12)


def prepare(directory: Path, parts: Sequence[str] = ALL, *, url: str = URL, jobs: int = 4) -> list[Path]:
    """Fetch, verify and unpack parts, and write `<part>.jsonl` for each; steps that are already done are skipped.

    Args:
        directory: folder for `LibriSpeech/<part>/` and the manifests. An existing archive `<part>.tar.gz` is used.
        parts: keys of :data:`PARTS`.
        url: address of OpenSLR's resources or of a mirror.
        jobs: how many parts are fetched, and how many files are read, at the same time.

    Returns:
        The paths of the manifests.

    Raises:
        OSError: A file cannot be fetched; see :func:`download`.
        ValueError: A part is unknown, another process prepares it in this folder, a checksum is wrong, a line of the
            transcripts is no id and text, or an archive lacks files that its transcripts name.
    """
    if unknown := set(parts) - PARTS.keys():
        raise ValueError(f"LibriSpeech's parts are {', '.join(PARTS)}, but not {', '.join(sorted(unknown))}")
    parts = list(dict.fromkeys(parts))
    directory.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    manifests = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for unpacked in as_completed([pool.submit(_unpack, directory, part, url, stop) for part in parts]):
                unpacked.result()
            for part in parts:
                manifest = directory / f"{part}.jsonl"
                write_manifest(manifest, pool.map(_clip, *zip(*_transcripts(directory, part), strict=True)))
                manifests.append(manifest)
        except BaseException:  # also Ctrl-C; otherwise the other threads would go on for hours
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return manifests


def _unpack(directory: Path, part: str, url: str, stop: threading.Event) -> None:
    """Fetch and unpack a part into `LibriSpeech/<part>`, which is complete or not there."""
    target = directory / "LibriSpeech" / part
    archive = directory / f"{part}.tar.gz"
    # A fetched archive is removed at the end; one that the user put there is not. So they have different names.
    fetched = directory / f"{part}.fetched.tar.gz"
    refusal = f"{part} must be prepared by one process, but another one does so in {directory}: wait for that"
    with locked(directory / f".{part}.lock", refusal):
        if not target.exists():
            resource, md5 = PARTS[part]
            source = archive if archive.exists() else fetched
            download(f"{url}/{resource}/{archive.name}", source, md5, stop)
            _extract(source, target, directory / f".{part}.unpacking", stop)
        fetched.unlink(missing_ok=True)


def _extract(archive: Path, target: Path, unpacking: Path, stop: threading.Event) -> None:
    shutil.rmtree(unpacking, ignore_errors=True)  # left by a killed run
    try:
        with written(unpacking), tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(unpacking, _members(tar, stop), filter="data")
            else:  # Python before 3.11.4, such as Debian 12's; the archive's checksum was right
                tar.extractall(unpacking, _members(tar, stop))
        target.parent.mkdir(parents=True, exist_ok=True)
        (unpacking / "LibriSpeech" / target.name).rename(target)
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)


def _members(tar: tarfile.TarFile, stop: threading.Event) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if stop.is_set():
            raise CancelledError
        yield member


def _transcripts(directory: Path, part: str) -> Iterator[tuple[Path, str, str]]:
    """Yield sound file, transcript and part of each clip, in the order of their names."""
    files = sorted((directory / "LibriSpeech" / part).rglob("*.trans.txt"))
    if not files:
        raise ValueError(f"{directory / 'LibriSpeech' / part} must hold *.trans.txt files, but holds none")
    sounds = set()
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            name, text = [*line.decode(errors="replace").split(maxsplit=1), "", ""][:2]
            sound = file.with_name(f"{name}.flac")
            if not text or "\ufffd" in text or sound in sounds:  # U+FFFD replaces what is no UTF-8
                raise ValueError(
                    f"{file}, line {number}: must be an id, listed once, and its text in UTF-8, found {line!r}: mend "
                    "the line, or remove the part, and run again"
                )
            sounds.add(sound)
            yield sound, text, part


def _clip(sound: Path, text: str, part: str) -> Clip:
    try:
        duration = soundfile.info(sound).duration
    except RuntimeError as error:
        raise ValueError(
            f"{sound} must be the sound of a transcript, but {error}. Remove the part, run again."
        ) from error
    return Clip(sound, round(duration, 4), text.lower(), {"speaker": sound.name.partition("-")[0], "source": part})
