"""The asyncio client: the methods of `_client.py` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, overload

from ._audio import describe_audio
from ._client import Outcome
from ._errors import CarnelianClientError, ModelNotReady, TransportError, about, without_frames
from ._long import DEFAULT_LONGEST_S, Recording
from ._retry import ONCE, RetryPolicy, retry_arguments
from ._settings import (
    DEFAULT_CONCURRENCY,
    DEFAULT_MODEL,
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    TAKEN_AHEAD,
    Settings,
    check_blocks,
    check_many,
)
from ._stream import DEFAULT_INTERIM_S, DEFAULT_PAUSE_S, Span, Stream
from ._types import TLS, Audio, DecodingOptions, Health, Model, Transcript, Utterance

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._stream import Block
    from ._transport import AsyncTransport

T = TypeVar("T")


class AsyncCarnelianClient:
    """A connection to one server for asyncio, with the arguments of `CarnelianClient`.

        async with AsyncCarnelianClient("localhost:8001", timeout_s=5) as client:
            print((await client.transcribe("clip.flac")).text)

    It belongs to the event loop of its first call. The request of a task that is cancelled still runs on the server.

    Raises:
        ValueError: an argument that cannot work.
        OSError: a certificate file that cannot be read.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        tls: TLS | None = None,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        # Not in the first call, whose deadline it would use: importing gRPC takes a third of a second.
        from ._transport import read_credentials

        self._settings = Settings(
            url=url,
            model=model,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            headers=headers,
            api_key=api_key,
        )
        self._credentials = read_credentials(tls)
        self._opened: AsyncTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = asyncio.Event()

    async def transcribe(
        self,
        audio: Audio,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Transcript:
        """Transcribe one clip; see `CarnelianClient.transcribe`. A thread reads and encodes it.

        `asyncio.run` waits for that thread before it ends: for ever, if the clip is a pipe that nobody writes to.
        """
        return await self._transcribe(audio, model, timeout_s, request_id, options, self._settings.retry)

    @overload
    def transcribe_many(
        self,
        clips: Iterable[Audio] | AsyncIterable[Audio],
        *,
        concurrency: int = ...,
        model: str | None = ...,
        timeout_s: float | None = ...,
        return_exceptions: Literal[False],
        **options: Unpack[DecodingOptions],
    ) -> AsyncGenerator[Transcript, None]: ...

    @overload
    def transcribe_many(
        self,
        clips: Iterable[Audio] | AsyncIterable[Audio],
        *,
        concurrency: int = ...,
        model: str | None = ...,
        timeout_s: float | None = ...,
        return_exceptions: bool = ...,
        **options: Unpack[DecodingOptions],
    ) -> AsyncGenerator[Outcome, None]: ...

    def transcribe_many(
        self,
        clips: Iterable[Audio] | AsyncIterable[Audio],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: str | None = None,
        timeout_s: float | None = None,
        return_exceptions: bool = True,
        **options: Unpack[DecodingOptions],
    ) -> AsyncGenerator[Outcome, None]:
        """Transcribe many clips, in their order; see `CarnelianClient.transcribe_many`.

        The iterable may be asynchronous, and then holds no outcome back while it waits for its next clip. Ending the
        loop early drops what is not sent and closes an asynchronous generator: at once if `contextlib.aclosing`
        closes the iterator, else when it is collected.
        """
        check_many(clips, concurrency, options)
        free = asyncio.Semaphore(concurrency)

        async def transcribe(audio: Audio) -> Outcome:
            async with free:
                try:
                    return await self.transcribe(audio, model=model, timeout_s=timeout_s, **options)
                except (CarnelianClientError, OSError) as error:
                    if not return_exceptions:
                        raise
                    return without_frames(error)

        async def outcomes() -> AsyncGenerator[Outcome, None]:
            room = asyncio.Semaphore(TAKEN_AHEAD * concurrency)
            pending: asyncio.Queue[asyncio.Task[Outcome] | None] = asyncio.Queue()
            tasks: set[asyncio.Task[Outcome]] = set()

            async def feed() -> None:
                source = _iterate(clips)
                try:
                    while True:
                        await room.acquire()
                        task = asyncio.create_task(transcribe(await anext(source)))
                        tasks.add(task)
                        pending.put_nowait(task)
                except StopAsyncIteration:
                    pass
                finally:
                    pending.put_nowait(None)
                    await source.aclose()

            # A task of its own: outcomes do not wait for a source that waits for its next clip.
            feeder = asyncio.create_task(feed())
            try:
                while (task := await pending.get()) is not None:
                    outcome = await task
                    tasks.discard(task)
                    yield outcome
                    room.release()
                await feeder  # raises what the source raised
            finally:
                for unfinished in (feeder, *tasks):
                    unfinished.cancel()
                await asyncio.gather(feeder, *tasks, return_exceptions=True)

        return outcomes()

    async def transcribe_long(
        self,
        audio: Audio,
        *,
        longest_piece_s: float = DEFAULT_LONGEST_S,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Transcript:
        """Transcribe a recording of any length; see `CarnelianClient.transcribe_long`. A thread reads and cuts it."""
        recording = Recording(audio, options, longest_piece_s)
        outcomes = self.transcribe_many(
            _in_thread(recording.pieces()), concurrency=concurrency, model=model, timeout_s=timeout_s, **options
        )
        async with aclosing(outcomes):
            async for outcome in outcomes:
                recording.add(outcome)
        return recording.transcript()

    def transcribe_stream(
        self,
        blocks: Iterable[Block] | AsyncIterable[Block],
        rate: int,
        *,
        interim_s: float | None = DEFAULT_INTERIM_S,
        pause_s: float = DEFAULT_PAUSE_S,
        longest_piece_s: float = DEFAULT_LONGEST_S,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[DecodingOptions],
    ) -> AsyncGenerator[Utterance | CarnelianClientError, None]:
        """Transcribe audio while it arrives; see `CarnelianClient.transcribe_stream`. A thread looks for speech in it.

        The iterable may be asynchronous, as one over the messages of a WebSocket. While another waits for its next
        block, the event loop stands still.
        """
        check_blocks(blocks, (Iterable, AsyncIterable), options)
        self._check_open()
        self._settings.choose_model(model)
        self._settings.deadline(timeout_s)
        stream = Stream(rate, interim_s, pause_s, longest_piece_s)

        async def spans() -> AsyncGenerator[Span, None]:
            try:
                async with aclosing(_iterate(blocks)) as source:
                    async for block in source:
                        self._check_open()
                        async for span in _in_thread(stream.add(block)):
                            yield span
            except Exception:
                for span in stream.end():
                    yield span
                raise
            for span in stream.end():
                yield span

        async def utterances() -> AsyncGenerator[Utterance | CarnelianClientError, None]:
            async with aclosing(spans()) as found:
                async for span in found:
                    outcome: Transcript | CarnelianClientError
                    retry = self._settings.retry if span.is_final else ONCE
                    try:
                        outcome = await self._transcribe((span.samples, rate), model, timeout_s, None, options, retry)
                    except CarnelianClientError as error:
                        outcome = without_frames(error)
                    if heard := stream.heard(span, outcome):
                        yield heard

        return utterances()

    async def is_ready(self, model: str | None = None, *, timeout_s: float | None = None) -> bool:
        """Say whether a model can be called now; see `CarnelianClient.is_ready`."""
        transport = self._transport()
        try:
            return await transport.is_model_ready(
                self._settings.choose_model(model), self._settings.deadline(timeout_s)
            )
        except (TransportError, ModelNotReady):
            return False

    async def health(self, *, timeout_s: float | None = None) -> Health:
        """Ask the server how it is, once; see `CarnelianClient.health`."""
        return await self._transport().health(self._settings.deadline(timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """List what is in the server's model repository; see `CarnelianClient.models`."""
        return await self._transport().models(self._settings.deadline(timeout_s))

    async def close(self) -> None:
        """Close the connection. Calls in flight end with an error."""
        self._closed.set()
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        self._transport()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be copied or sent to another process; make one there")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.url!r}, model={self._settings.model!r})"

    async def _transcribe(
        self,
        audio: Audio,
        model: str | None,
        timeout_s: float | None,
        request_id: str | None,
        options: DecodingOptions,
        retry: RetryPolicy,
    ) -> Transcript:
        import tenacity

        transport = self._transport()
        deadline = self._settings.deadline(timeout_s)
        model = self._settings.choose_model(model)
        reading = asyncio.create_task(
            asyncio.to_thread(self._settings.request, audio, model, request_id, options, deadline)
        )
        with about(describe_audio(audio), model, request_id):
            try:  # not `wait_for`, which before Python 3.12 can lose a cancellation
                await asyncio.wait({reading}, timeout=deadline.left_s)
            finally:
                is_late = reading.cancel()
            if is_late:
                raise deadline.error(", or leave threads of the event loop's executor free")
            request = await reading
        retrying = tenacity.AsyncRetrying(sleep=self._wait, **retry_arguments(retry, deadline))
        return await retrying(transport.infer, request, deadline)

    async def _wait(self, seconds: float) -> None:
        """Sleep before another attempt; closing the client ends the sleep."""
        closing = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait({closing}, timeout=seconds)
        finally:
            closing.cancel()

    def _transport(self) -> AsyncTransport:
        """Return the channel. The first call opens it, because gRPC ties it to the event loop that runs then."""
        from ._transport import AsyncTransport

        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "the client belongs to the event loop of its first call, and this is another; make a new one."
            )
        self._loop = loop
        if self._opened is None:
            self._opened = AsyncTransport(self._settings.url, self._credentials, self._settings.metadata)
        return self._opened

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the client is closed; make a new one.")


async def _iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    if isinstance(items, AsyncIterable):
        source = aiter(items)
        try:
            async for item in source:
                yield item
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()
    else:
        for item in items:
            yield item
            await asyncio.sleep(0)  # let requests start while a long list is walked


async def _in_thread(items: Iterator[T]) -> AsyncGenerator[T, None]:
    """Take each item in a thread; one that is cancelled ends with its item."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item
