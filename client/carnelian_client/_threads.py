"""Work in threads that Python does not wait for when it ends."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ._retry import Deadline

CTRL_C_HEARD_S = 1.0
"""How long a thread waits at a stretch, in seconds: a Ctrl-C that comes just before it begins to wait does not wake it,
and Python tells of it only when the wait is over."""

T = TypeVar("T")
Item = TypeVar("Item")


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own, with the caller's context variables; the future has what it gives."""
    future: Future[T] = Future()
    function = partial(contextvars.copy_context().run, function)  # logs and traces keep what they belong to in it
    threading.Thread(target=_run, args=(function, future), name="carnelian_call", daemon=True).start()
    return future


def _run(function: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        del function, future  # the error refers to this frame, and would hold itself and what was sent


def result(future: Future[T], deadline: Deadline | None = None) -> T:
    """Wait for what a thread returns or raises; raise DeadlineExceeded where it comes too late."""
    while not wait([future], min(deadline.left_s, CTRL_C_HEARD_S) if deadline else CTRL_C_HEARD_S).done:
        if deadline is not None and deadline.is_over:
            raise deadline.error()
    try:
        return future.result()
    finally:
        del future  # as in `_run`


def outside_main_thread(function: Callable[[], T]) -> T:
    """Call a function of soundfile or gRPC, in another thread if this is the main one.

    Handlers of signals run in the main thread alone, and may raise anywhere, as that of Ctrl-C does. libsndfile reads
    files in memory by calling Python: an exception there is lost, and what was read is damaged. Within gRPC, it leaves
    locks locked, or a call without the thread that hears its answer.
    """
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return function()  # before 3.12, a thread would never run at the very end of Python
    try:
        started = [start(function)]
    except RuntimeError:  # from 3.12 on, none starts there; in 3.12.0 and 3.12.1, nor where `atexit` calls
        return function()
    return result(started.pop())  # for an error refers to this frame, as to that of `_run`


class Workers(Generic[Item, T]):
    """Threads that call one function on each item, with the context variables of the thread that submits it.

    Python does not wait for them, as it does for those of a ThreadPoolExecutor. With an executor, a program would hang
    on Ctrl-C for as long as its calls may take: for ever, if one reads a pipe that nobody writes to. To `start` a
    thread for each item would cost small clips a good part of their throughput.
    """

    def __init__(self, function: Callable[[Item], T], num_threads: int) -> None:
        self._function = function
        self._num_threads = num_threads
        self._num_started = 0
        self._tasks: SimpleQueue[tuple[Future[T], contextvars.Context, Item] | None] = SimpleQueue()

    def submit(self, item: Item) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, contextvars.copy_context(), item))
        if self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._work, name=f"carnelian_{self._num_started}", daemon=True).start()
        return future

    def release(self) -> None:
        """Let the threads end, each after the item it works on."""
        for _ in range(self._num_started):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, context, item = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(context.run(self._function, item))
            except BaseException as error:
                future.set_exception(error)
            del task, future, context, item  # else an idle thread would hold its last item


def map_in_order(
    function: Callable[[Item], T], items: Iterable[Item], num_threads: int, most_ahead: int
) -> Generator[T, None, None]:
    """Call a function on each item in threads; yield the results in the items' order, or raise the first error.

    A source that raises does so after the results of the items before it. One that may wait for its next item is asked
    for it only while no result is ready. Closing the generator drops what no thread has begun.

    Args:
        function: What to call.
        items: Its arguments, one by one.
        num_threads: How many calls may run at once.
        most_ahead: The most items that are taken ahead of the results.
    """
    workers = Workers(function, num_threads)
    pending: deque[Future[T]] = deque()
    source: Iterator[Item] | None = iter(items)
    source_error: Exception | None = None
    may_wait = not isinstance(items, Sequence)
    try:
        while True:
            while source is not None and len(pending) < most_ahead:
                if may_wait and pending and pending[0].done():
                    break
                try:
                    pending.append(workers.submit(next(source)))
                except StopIteration:
                    source = None
                except Exception as error:
                    source, source_error = None, error
            if not pending:
                break
            yield result(pending.popleft())
        if source_error is not None:
            raise source_error
    finally:
        for future in pending:
            future.cancel()
        workers.release()
