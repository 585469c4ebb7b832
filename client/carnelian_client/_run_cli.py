"""A run of `carnelian-transcribe` over its files: what comes of each, and when to stop."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from ._audio import read_all
from ._errors import OF_ALL_CLIPS, CarnelianClientError, ModelNotReady, ServerBusy, TransportError
from ._files_cli import STDIN
from ._output_cli import OutputError, name_once

if TYPE_CHECKING:
    from ._client import CarnelianClient, Outcome
    from ._files_cli import Clip
    from ._types import Audio, DecodingOptions, Transcript

NO_ANSWER = (TransportError, ModelNotReady, ServerBusy)
"""The errors of a server that is away or overloaded."""
OUT_OF_ORDER = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Why nothing more can be written: a disk that is full, read-only or broken."""


class Run:
    """Takes the outcomes of clips until the clips that are left would fail too, whatever they are.

    Args:
        clips: What to transcribe.
        concurrency: How many may be in flight at a time. One break of a connection may cost all of them, so the run
            is stopped only if more than that in a row get no answer.
        num_there: How many files besides were transcribed by an earlier run.
        can_go_on: Whether a later run can leave out what this one has done.
    """

    def __init__(self, clips: list[Clip], concurrency: int, *, num_there: int = 0, can_go_on: bool = False) -> None:
        self._clips = clips
        self._concurrency = concurrency
        self._num_there = num_there
        self._advice = "; the same command with --existing skip goes on" if can_go_on else ""
        self._num_unanswered = 0
        self._num_done = 0
        self._num_failed = 0
        self.why_stopped = ""
        """Why it was stopped, if it was."""

    @property
    def _num_left(self) -> int:
        """How many clips are neither done nor reported as failed."""
        return len(self._clips) - self._num_done - self._num_failed

    def describe_interruption(self) -> str:
        """Say how far the run got."""
        return (
            f"interrupted: {self._num_done} done, {self._num_failed} failed, {self._num_left} not tried{self._advice}"
        )

    def sum_up(self) -> Iterator[str]:
        """Yield what is to be said at the end: what was not tried, and what was there before."""
        if self.why_stopped and self._num_left:
            are_left = "1 file was" if self._num_left == 1 else f"{self._num_left} files were"
            yield f"stopped: {self.why_stopped}; {are_left} not tried{self._advice}"
        if self._num_there:
            yield f"{self._num_there} of {self._num_there + len(self._clips)} files were transcribed already"

    def files(self) -> Iterator[str]:
        """Yield the names of the clips, as long as there is any use in it."""
        for clip in self._clips:
            if self.why_stopped:
                return
            yield clip.file

    def take(self, outcomes: Iterator[Outcome], deliver: Callable[[Transcript, Clip], None]) -> Iterator[str]:
        """Deliver the transcripts, and yield an error message for each file that fails.

        What was in flight when the run was stopped is still delivered; if it fails too, it counts as left.

        Args:
            outcomes: What came of `files()`, in their order.
            deliver: Prints or writes a clip's transcript; raises OutputError.
        """
        for clip, outcome in zip(self._clips, outcomes, strict=False):  # there are fewer outcomes after a stop
            error = outcome if isinstance(outcome, Exception) else _undelivered(outcome, clip, deliver)
            if error is None:
                self._num_done += 1
                self._num_unanswered = 0
            elif not self.why_stopped:
                self._num_failed += 1
                yield name_once(clip.file, error)
                self.why_stopped = self._why_stop(error)

    def _why_stop(self, error: Exception) -> str:
        if isinstance(error, NO_ANSWER):
            self._num_unanswered += 1
        elif isinstance(error, OutputError) or getattr(error, "status", None):  # the server answered
            self._num_unanswered = 0
        if isinstance(error, OF_ALL_CLIPS) or (isinstance(error, OutputError) and error.errno in OUT_OF_ORDER):
            return "the other files would fail too"
        if self._num_unanswered > self._concurrency:
            return f"{self._num_unanswered} files in a row got no answer"
        return ""


def _undelivered(transcript: Transcript, clip: Clip, deliver: Callable[[Transcript, Clip], None]) -> OutputError | None:
    try:
        deliver(transcript, clip)
    except OutputError as error:
        return error
    return None


def transcribe_each(
    client: CarnelianClient, files: Iterator[str], concurrency: int, options: DecodingOptions
) -> Generator[Outcome, None, None]:
    """Transcribe clips, several at a time; yield an outcome for each, in their order."""
    while True:
        try:
            yield from client.transcribe_many(map(_audio, files), concurrency=concurrency, **options)
            return
        except _StandardInputError as error:  # after the outcomes of the files before it
            yield error


def transcribe_each_long(
    client: CarnelianClient, files: Iterator[str], longest_piece_s: float, concurrency: int, options: DecodingOptions
) -> Generator[Outcome, None, None]:
    """Transcribe recordings of any length, one after the other; yield an outcome for each."""
    for file in files:
        try:
            yield client.transcribe_long(
                _audio(file), longest_piece_s=longest_piece_s, concurrency=concurrency, **options
            )
        except (CarnelianClientError, OSError) as error:
            yield error


class _StandardInputError(OSError):
    """The standard input cannot be read."""


def _audio(file: str) -> Audio:
    try:
        return read_all(sys.stdin.buffer) if file == STDIN else file
    except OSError as error:  # as of a terminal that is gone
        raise _StandardInputError(error.errno, f"the standard input cannot be read: {error.strerror}") from error
