"""The log of one tritonserver: read to its end by a thread of its own, kept in part, and handed on."""

from __future__ import annotations

import collections
import logging
import re
import threading
from collections.abc import Callable
from typing import IO

from carnelian_serving.startup_log import is_noise

logger = logging.getLogger(__name__)

KEPT_LINES = 1000
READER_END_S = 5.0
"""The log is read to its end long before, unless who gets its lines takes no more: a full pipe, a stopped terminal."""
_CRASH = re.compile(r"^Signal \((4|6|7|8|11)\) received\.")


class ServerLog:
    """The log of one server."""

    def __init__(self, on_line: Callable[[str], None] | None, *, with_noise: bool) -> None:
        """Describe who gets it.

        Args:
            on_line: Called with each line, from another thread, until it raises.
            with_noise: Whether it gets what says nothing, too.
        """
        self._on_line = on_line
        self._with_noise = with_noise
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._stream: IO[str] | None = None
        self._reader: threading.Thread | None = None
        self.crash_signal: int | None = None
        """The number of the signal of its own that tritonserver tells of."""

    @property
    def lines(self) -> list[str]:
        """The last ones."""
        return list(self._lines)

    def follow(self, stream: IO[str]) -> None:
        """Read on from now."""
        self._stream = stream
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Wait until all is read."""
        if self._reader is None or self._stream is None:
            return
        self._reader.join(READER_END_S)
        if not self._reader.is_alive():
            self._stream.close()

    def tell(self, line: str) -> None:
        """Hand a line on. Who raises gets no more: tritonserver stops where nobody reads on."""
        if self._on_line is None:
            return
        try:
            self._on_line(line)
        except Exception:
            logger.exception("`on_log` must take every line of the log, but raised; it gets no more")
            self._on_line = None

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            line = line.rstrip("\n")
            self._lines.append(line)
            if crash := _CRASH.match(line):
                self.crash_signal = int(crash[1])
            if self._with_noise or not is_noise(line):
                self.tell(line)
