"""`carnelian-transcribe --stream`: audio that is still being recorded, told utterance by utterance."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain
from queue import Empty, Queue
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from . import _threads
from ._errors import CarnelianClientError, InvalidAudio
from ._formats import FORMATTING, json_line

if TYPE_CHECKING:
    from ._stream import Block
    from ._types import Utterance

BLOCK_S = 0.1
MAX_BLOCKS_AHEAD = 600
"""How much is read while the server is busy, a minute: a recorder that has to wait loses what is said."""
SIGNAL_HEARD_S = 0.2
LEFT_BEHIND_S = 1.0
CLEAR_LINE = "\r\x1b[K"


def tell_stream(
    hear: Callable[..., Iterator[Utterance | CarnelianClientError]], file: BinaryIO, kind: str
) -> Generator[str | CarnelianClientError, None, None]:
    """Yield what to print of each utterance of a file or pipe while it is read, or the error of one that failed.

    The first Ctrl-C or SIGTERM ends the audio, and a second one the program. Interim results are asked for only where
    they are shown.

    Args:
        hear: `CarnelianClient.transcribe_stream`, given all but the audio.
        file: The open file; it is read by its descriptor.
        kind: json has a line for each result, interim ones too. text has one for those that are final; on a terminal,
            it shows the others while they last.

    Raises:
        InvalidAudio: libsndfile cannot read the file, or it has no samples.
        CarnelianClientError: what `CarnelianClient.transcribe_stream` raises.
        ModuleNotFoundError: soundfile or the extra `live` is not installed.
    """
    if kind != "json" and not sys.stdout.isatty():
        hear = partial(hear, interim_s=None)
    with _first_signal() as is_over, closing(_Reader(file, is_over)) as reader:
        arriving = reader.blocks()
        if (first := next(arriving, None)) is None:
            return
        rate, _ = first
        for heard in hear((block for _, block in chain([first], arriving)), rate):
            if not isinstance(heard, CarnelianClientError):
                yield _line(heard, kind)
                continue
            if sys.stdout.isatty():
                yield CLEAR_LINE
            yield heard


def _line(utterance: Utterance, kind: str) -> str:
    transcript = utterance.transcript
    if kind == "json":
        own = {
            "utterance": utterance.index,
            "start": round(utterance.start_s, 3),
            "end": round(utterance.end_s, 3),
            "is_final": utterance.is_final,
            "request_id": transcript.request_id,
        }
        return json_line(own, transcript.raw)
    text = transcript.text.translate(FORMATTING)
    final = f"{text}\n" if utterance.is_final and text else ""
    if not sys.stdout.isatty():
        return final
    width = shutil.get_terminal_size().columns - 1  # a line that went on in the next one could not be cleared
    return CLEAR_LINE + (final if utterance.is_final else _last_cells(text, width))


def _last_cells(text: str, width: int) -> str:
    """Return the end of a text that fits into so many cells of a terminal, of which some scripts take two a letter."""
    start = len(text)
    while start and (width := width - 1 - (unicodedata.east_asian_width(text[start - 1]) in "WF")) >= 0:
        start -= 1
    return text[start:]


@contextmanager
def _first_signal() -> Iterator[threading.Event]:
    """Make the first Ctrl-C or SIGTERM set an event, where such a signal would end the program."""
    happened = threading.Event()
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    heeded = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}

    def stop(number: int, frame: FrameType | None) -> None:
        happened.set()
        for each, handler in heeded.items():
            signal.signal(each, handler)

    for number in heeded:
        signal.signal(number, stop)
    try:
        yield happened
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


class _Reader:
    """Reads a file in a thread until an event is set."""

    def __init__(self, file: BinaryIO, is_over: threading.Event) -> None:
        self._file = file
        self._is_over = is_over
        self._arrived: Queue[tuple[int, Block] | None] = Queue(MAX_BLOCKS_AHEAD)
        self._reading = _threads.start(self._read)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the sample rate with each block, as they arrive."""
        while True:
            try:
                block = self._arrived.get(timeout=SIGNAL_HEARD_S)
            except Empty:
                if self._is_over.is_set():  # the thread waits for a recorder that writes nothing
                    return
                continue
            if block is None:
                return self._reading.result()
            yield block

    def close(self) -> None:
        """Wait for the thread: one that comes back from libsndfile while Python ends would crash it.

        The thread of a recorder that writes nothing is left behind.
        """
        self._is_over.set()
        deadline_s = time.monotonic() + LEFT_BEHIND_S
        while not self._reading.done() and time.monotonic() < deadline_s:
            with suppress(Empty):
                self._arrived.get(timeout=BLOCK_S)

    def _read(self) -> None:
        try:
            for block in _blocks(self._file):
                self._arrived.put(block)
                if self._is_over.is_set():
                    break
        finally:
            self._arrived.put(None)


def _blocks(file: BinaryIO) -> Iterator[tuple[int, Block]]:
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("live audio is read by soundfile; install it with: pip install soundfile") from error

    num_blocks = 0
    try:
        with soundfile.SoundFile(file.fileno(), closefd=False) as source:
            if "ADPCM" in source.subtype and not source.seekable():
                raise InvalidAudio(f"{source.subtype} cannot be read from a pipe, whose end libsndfile does not notice")
            if source.format == "MP3" and source.seekable() and not file.seekable():  # it would lose its place
                raise InvalidAudio(
                    "MP3 that counts its frames cannot be read as it comes; use `--long -`, which waits for its end, "
                    "or write WAV, as `ffmpeg -f wav -` does"
                )
            source.seekable = lambda: False  # as of an `AudioFile`
            size = max(round(BLOCK_S * source.samplerate), 1)
            dtype = "int16" if source.subtype == "PCM_16" else "float32"
            while len(block := source.read(size, dtype)):
                yield source.samplerate, block
                num_blocks += 1
    except soundfile.LibsndfileError as error:
        raise InvalidAudio(
            f"libsndfile cannot read it as it comes ({error.error_string}); write WAV, as `ffmpeg -f wav -` does"
        ) from error
    if not num_blocks:
        raise InvalidAudio("no samples, or none that its header counts; it must count too many while it grows")
