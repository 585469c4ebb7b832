"""`carnelian-transcribe --stream`: audio that is still being recorded, told utterance by utterance."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from itertools import chain
from queue import Empty, Queue
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from . import _threads
from ._errors import CarnelianClientError, InvalidAudio

if TYPE_CHECKING:
    from ._client import CarnelianClient
    from ._stream import Block
    from ._types import DecodingOptions, Utterance

BLOCK_S = 0.1
MAX_BLOCKS_AHEAD = 600
"""How much is read while the server is busy, a minute: a recorder that has to wait loses what is said."""
CTRL_C_HEARD_S = 0.2
CLEAR_LINE = "\r\x1b[K"


def tell_stream(
    client: CarnelianClient, file: BinaryIO, kind: str, longest_piece_s: float, options: DecodingOptions
) -> Iterator[str | CarnelianClientError]:
    """Yield what to print of each utterance of a file or pipe while it is read, or the error of one that failed.

    The first Ctrl-C ends the audio, and a second one the program.

    Args:
        client: Who transcribes.
        file: The open file; it is read by its descriptor.
        kind: json has a line for each result, interim ones too. text has one for those that are final; on a terminal,
            it shows the others while they last.
        longest_piece_s: The longest utterance, 5 to 60 s.
        options: How to decode.

    Raises:
        InvalidAudio: libsndfile cannot read the file, or it has no samples.
        ModuleNotFoundError: soundfile or the extra `live` is not installed.
    """
    with _first_ctrl_c() as is_over:
        arriving = _read_ahead(file, is_over)
        for first in arriving:
            rate, _ = first
            blocks = (block for _, block in chain([first], arriving))
            for heard in client.transcribe_stream(blocks, rate, longest_piece_s=longest_piece_s, **options):
                if not isinstance(heard, CarnelianClientError):
                    yield _line(heard, kind)
                    continue
                if sys.stdout.isatty():
                    yield CLEAR_LINE
                yield heard


def _line(utterance: Utterance, kind: str) -> str:
    transcript = utterance.transcript
    if kind == "json":
        found = {
            "utterance": utterance.index,
            "start": round(utterance.start_s, 3),
            "end": round(utterance.end_s, 3),
            "is_final": utterance.is_final,
            "request_id": transcript.request_id,
            **transcript.raw,
        }
        return json.dumps(found, ensure_ascii=False) + "\n"
    final = f"{transcript.text}\n" if utterance.is_final and transcript.text else ""
    if not sys.stdout.isatty():
        return final
    width = shutil.get_terminal_size().columns - 1  # a line that went on in the next one could not be cleared
    return CLEAR_LINE + (final if utterance.is_final else _last_cells(transcript.text, width))


def _last_cells(text: str, width: int) -> str:
    """Return the end of a text that fits into so many cells of a terminal, of which some scripts take two a letter."""
    start = len(text)
    while start and (width := width - 1 - (unicodedata.east_asian_width(text[start - 1]) in "WF")) >= 0:
        start -= 1
    return text[start:]


@contextlib.contextmanager
def _first_ctrl_c() -> Iterator[threading.Event]:
    """Make the first Ctrl-C set an event, unless all are ignored."""
    happened = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield happened
        return

    def stop(number: int, frame: FrameType | None) -> None:
        happened.set()
        signal.signal(number, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield happened
    finally:
        signal.signal(signal.SIGINT, before)


def _read_ahead(file: BinaryIO, is_over: threading.Event) -> Iterator[tuple[int, Block]]:
    """Read a file in a thread, and yield the sample rate with each block that is read before the event is set."""
    arrived: Queue[tuple[int, Block] | None] = Queue(MAX_BLOCKS_AHEAD)

    def read() -> None:
        try:
            for block in _blocks(file):
                arrived.put(block)
                if is_over.is_set():
                    break
        finally:
            arrived.put(None)

    reading = _threads.start(read)
    while True:
        try:
            block = arrived.get(timeout=CTRL_C_HEARD_S)
        except Empty:
            if is_over.is_set():  # the thread waits for a recorder that writes nothing
                return
            continue
        if block is None:
            return reading.result()
        yield block


def _blocks(file: BinaryIO) -> Iterator[tuple[int, Block]]:
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("live audio is read by soundfile; install it with: pip install soundfile") from error

    try:
        with soundfile.SoundFile(file.fileno(), closefd=False) as source:
            if not source.frames:
                raise InvalidAudio("no samples, or none that its header counts; it must count too many while it grows")
            size = max(round(BLOCK_S * source.samplerate), 1)
            dtype = "int16" if source.subtype == "PCM_16" else "float32"
            while len(block := source.read(size, dtype)):
                yield source.samplerate, block
    except soundfile.LibsndfileError as error:
        raise InvalidAudio(
            f"libsndfile cannot read it as it comes ({error.error_string}); write WAV, as `ffmpeg -f wav -` does"
        ) from error
