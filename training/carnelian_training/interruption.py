"""Signals that stop a run after its step, with a checkpoint: SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal)."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """A context in which the first signal is only stored in `signal`; a second Ctrl-C stops the process at once.

    A second SIGTERM does not stop it, because `torchrun` sends one after the terminal's Ctrl-C.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
                numbers.append(signal.SIGHUP)
            self._handlers = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
