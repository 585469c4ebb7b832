"""The log of one tritonserver: one thread reads all of it and keeps the last lines, another hands lines on.

Whoever gets it may be slow, as a stopped terminal or a full pipe: tritonserver must not wait for it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import IO

from carnelian_serving.startup_log import is_noise, tells_of_end, tells_of_failure

logger = logging.getLogger(__name__)

KEPT_LINES = 1000
MOST_WAITING = 10_000
"""The largest number of lines that wait to be handed on; further ones are left out until half of these are taken."""
READER_END_S = 5.0
"""How long to wait at the end for lines to be handed on: long enough, unless the receiver takes no more."""


class ServerLog:
    """The log of one server."""

    def __init__(self, on_line: Callable[[str], None] | None, *, with_noise: bool) -> None:
        """Describe who gets the lines.

        Args:
            on_line: Called with each line, from another thread, until it raises.
            with_noise: Whether it gets what says nothing, too.
        """
        self._on_line = on_line
        self._with_noise = with_noise
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._reader: threading.Thread | None = None
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._num_left_out = 0
        self._telling = threading.Lock()
        self._writer = threading.Thread(target=self._hand_on, daemon=True)
        self.end_status: int | None = None
        """The exit status that the log tells of, as `subprocess` gives it: a crash, or a start that failed."""
        self.has_failed = False
        """Whether the log names a model that could not be loaded."""

    @property
    def lines(self) -> list[str]:
        """The last lines of the log."""
        return list(self._lines)

    def follow(self, stream: IO[str], rewrite: Callable[[str], str] = str) -> None:
        """Read the stream from now on; keep each line, as `rewrite` returns it, and hand it on.

        Raises:
            RuntimeError: No thread can be had.
        """
        self._writer.start()
        reader = threading.Thread(target=self._read, args=(stream, rewrite), daemon=True)
        reader.start()
        self._reader = reader

    def close(self) -> None:
        """Wait until all lines are read and handed on, for at most :data:`READER_END_S`."""
        if self._reader is not None:
            self._reader.join(READER_END_S)
        if not self._writer.is_alive():
            return
        with contextlib.suppress(queue.Full):
            with self._telling:
                left_out = self._count_left_out() if self._num_left_out else None
            if left_out is not None:
                self._waiting.put(left_out, timeout=READER_END_S)
            self._waiting.put(None, timeout=READER_END_S)
            self._writer.join(READER_END_S)

    def tell(self, line: str) -> None:
        """Hand a line on, after those that wait."""
        with self._telling:
            if self._num_left_out and self._waiting.qsize() <= MOST_WAITING // 2:
                self._waiting.put_nowait(self._count_left_out())
            if not self._num_left_out:
                with contextlib.suppress(queue.Full):
                    self._waiting.put_nowait(line)
                    return
            self._num_left_out += 1

    def _count_left_out(self) -> str:
        count, self._num_left_out = self._num_left_out, 0
        return f"carnelian-serve: {count} lines of the log are left out here, for nobody took them"

    def _hand_on(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self._on_line is None:
                continue
            try:
                self._on_line(line)
            # A callback that raises is not called again. Reading must go on, or tritonserver would block.
            except Exception:
                logger.exception("`on_log` must take every line of the log, but raised; it gets no more")
                self._on_line = None

    def _read(self, stream: IO[str], rewrite: Callable[[str], str]) -> None:
        with stream:
            # Where open files run out, Triton writes one line again and again, megabytes of it a second.
            for line, repetitions in itertools.groupby(rewrite(line.rstrip("\n")) for line in stream):
                self._lines.append(line)
                if (status := tells_of_end(line)) is not None:
                    self.end_status = status
                self.has_failed = self.has_failed or tells_of_failure(line)
                is_told = self._with_noise or not is_noise(line)
                if is_told:
                    self.tell(line)
                num_times = sum(1 for _ in repetitions)
                if line and num_times > 1 and is_told:
                    self.tell(f"carnelian-serve: this came {num_times} times: {line}")
