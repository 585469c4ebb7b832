"""The TensorBoard file of a run: events with its curves and transcripts.

Events are written at once. tensorboardX's own `SummaryWriter` (2.6.5) writes in a thread, which dies when the disk is
full; every later call then waits for it forever, and the process cannot end.
"""

import logging
import os
import re
import socket
import struct
import time
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar, text

logger = logging.getLogger(__name__)


class TensorBoard:
    """A writer of TensorBoard events. If a write fails, it warns and writes no more; the run goes on.

    The run continues from `step`: TensorBoard then hides earlier events of later steps.
    """

    def __init__(self, directory: Path, step: int) -> None:
        # TensorBoard finds files by this form of name, and reads those of a folder in the order of the time in it.
        self.path = directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._works = True
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"), Event(step=step + 1, session_log=start))

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        """Add the point of `step` to each curve."""
        # The library would replace the same characters in a source's name, and log it each time.
        curves = [scalar(re.sub(r"[^-/\w.]", "_", name), value) for name, value in values.items()]
        self._write(*(Event(step=step, summary=point) for point in curves))

    def add_text(self, step: int, name: str, markdown: str) -> None:
        """Add a text in Markdown."""
        self._write(Event(step=step, summary=text(name, markdown)))

    def _write(self, *events: Event) -> None:
        if not self._works:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                for event in events:
                    event.wall_time = time.time()
                    file.write(_record(event.SerializeToString()))
        except OSError as error:
            self._works = False  # nothing after an incomplete record can be read
            logger.warning("the run goes on without TensorBoard: %s could not be written: %s", self.path, error)


def _record(content: bytes) -> bytes:
    """Return a record of TensorFlow's TFRecord format: length, its checksum, content, its checksum."""
    length = struct.pack("<Q", len(content))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + checksums[0] + content + checksums[1]
