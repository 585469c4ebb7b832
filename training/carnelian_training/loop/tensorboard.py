"""What TensorBoard shows of a run: its curves and transcripts, as events in a file.

They are written at once. tensorboardX's own `SummaryWriter` (2.6.5) leaves that to a thread, which a full disk ends;
then whatever comes next waits for it for ever, the end of the process too.
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
    """Writes events; once that fails it says so and writes no more, for a run needs none of them.

    Args:
        directory: gets a file of events.
        step: where the run goes on from. TensorBoard hides what there is of later steps.
    """

    def __init__(self, directory: Path, step: int) -> None:
        # TensorBoard goes by the name, and reads the files of a folder in the order of their times.
        self.path = directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._works = True
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"), Event(step=step + 1, session_log=start))

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        # The library would do the same to the name of a source, and say so each time.
        curves = [scalar(re.sub(r"[^-/\w.]", "_", name), value) for name, value in values.items()]
        self._write(*(Event(step=step, summary=point) for point in curves))

    def add_text(self, step: int, name: str, markdown: str) -> None:
        """Add a text."""
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
            self._works = False  # what comes after half a record cannot be read
            logger.warning("the run goes on without TensorBoard: %s could not be written: %s", self.path, error)


def _record(content: bytes) -> bytes:
    """TensorFlow's records: length, its checksum, content, its checksum."""
    length = struct.pack("<Q", len(content))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + checksums[0] + content + checksums[1]
