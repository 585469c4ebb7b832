"""Work in a thread of its own, which Python does not wait for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own; the future has its result, or what it raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="carnelian_reader", daemon=True).start()
    return future


def outside_main_thread(function: Callable[[], T]) -> T:
    """Call a function that reads through soundfile, in another thread if this is the main one.

    libsndfile reads files in memory by calling Python. If the handler of a signal raises there, as that of Ctrl-C does,
    the exception is lost, and what was read is damaged. Handlers run in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    return start(function).result()
