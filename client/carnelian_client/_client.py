"""The blocking client: clips in, transcripts out. `_aio.py` is its twin for asyncio.

A call goes through `_settings` (encode the clip), `_retry` (again, while there is time) and `_transport`
(Triton's protocol), and ends as one of `_types` or of `_errors`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, overload

from . import _threads
from ._audio import describe_audio
from ._errors import CarnelianClientError, ModelNotReady, TransportError, about, without_frames
from ._long import DEFAULT_LONGEST_S, Recording
from ._retry import ONCE, Deadline, RetryPolicy, retry_arguments
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
from ._types import TLS, Audio, DecodingOptions, Health, Model, Request, Transcript, Utterance

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._stream import Block

Outcome: TypeAlias = Transcript | CarnelianClientError | OSError
"""What `transcribe_many` yields for a clip: its transcript, or what `transcribe` would have raised."""


class CarnelianClient:
    """A connection to one server. Threads may share it; processes may not.

    gRPC does not work after a fork once it has been called, so a call raises RuntimeError then. Fork before the first
    call, or close the client before the fork and make a new one in each process, or start processes by spawn.

        with CarnelianClient("localhost:8001", timeout_s=5) as client:
            print(client.transcribe("clip.flac").text)

    Args:
        url: `host:port` of Triton's gRPC endpoint, or another gRPC target. The addresses of a name that has
            several, such as a headless service's `dns:///carnelian.speech:8001`, are used in turn.
        model: Name of the ensemble, unless a call names another.
        timeout_s: Time for one call, including reading the clip and retries. The server is told of it too. If the
            clip is a pipe that nobody writes to, the thread that waits for it stays behind. A disk that hangs is waited
            for.
        retry: Which failures are tried again, and when.
        tls: How to encrypt the connection; None does not encrypt it.
        headers: Sent with every call, such as the key of Triton's restricted protocols.
        api_key: Sent as `authorization: Bearer ...`, for a gateway before the server. Without `tls`, all who share the
            network can read it.

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
        # gRPC takes its time, and `import carnelian_client` should not.
        from ._transport import Transport, read_credentials

        self._settings = Settings(
            url=url,
            model=model,
            timeout_s=timeout_s,
            retry=retry or RetryPolicy(),
            headers=headers,
            api_key=api_key,
        )
        self._transport = Transport(url, read_credentials(tls), self._settings.metadata)
        self._closed = threading.Event()

    def transcribe(
        self,
        audio: Audio,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Transcript:
        """Transcribe one clip.

        Args:
            audio: A path, the bytes of an audio file, or `(samples, rate)`; see `Audio`.
            model: By default the client's.
            timeout_s: By default the client's.
            request_id: Appears in errors and, from `--log-level info` on, in the server's log if a stage refuses the
                clip. By default a random one.
            **options: See `DecodingOptions`.

        Raises:
            InvalidAudio: the clip cannot be transcribed.
            InvalidOption: the model does not know the option, or not this value.
            TransportError: no answer came, or not in time.
            ServerError: the server answered with another error.
            OSError: the path cannot be read.
        """
        return self._transcribe(audio, model, timeout_s, request_id, options, self._settings.retry)

    @overload
    def transcribe_many(
        self,
        clips: Iterable[Audio],
        *,
        concurrency: int = ...,
        model: str | None = ...,
        timeout_s: float | None = ...,
        return_exceptions: Literal[False],
        **options: Unpack[DecodingOptions],
    ) -> Generator[Transcript, None, None]: ...

    @overload
    def transcribe_many(
        self,
        clips: Iterable[Audio],
        *,
        concurrency: int = ...,
        model: str | None = ...,
        timeout_s: float | None = ...,
        return_exceptions: bool = ...,
        **options: Unpack[DecodingOptions],
    ) -> Generator[Outcome, None, None]: ...

    def transcribe_many(
        self,
        clips: Iterable[Audio],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: str | None = None,
        timeout_s: float | None = None,
        return_exceptions: bool = True,
        **options: Unpack[DecodingOptions],
    ) -> Generator[Outcome, None, None]:
        """Transcribe many clips, `concurrency` at a time, and yield one outcome for each, in their order.

        If a clip fails, its outcome is the error, and the other clips still get their transcripts:

            for path, outcome in zip(paths, client.transcribe_many(paths)):
                print(path, outcome.text if isinstance(outcome, Transcript) else f"failed: {outcome}")

        At most `2 * concurrency` clips are taken from the iterable ahead of the outcomes, so a generator over any
        number of files needs little memory. A generator is asked for its next clip only while no outcome is ready. If
        it waits there, as on a queue, outcomes wait too, and a loop that works long on each outcome may leave the
        server idle. Neither happens with a list, or with `AsyncCarnelianClient`. Ending the loop early drops the clips
        that are not sent yet.

        Args:
            clips: Each as `transcribe` takes it. An array must stay as it is until its outcome comes.
            concurrency: Requests in flight at once; the server makes batches of them.
            model: By default the client's.
            timeout_s: The time for each clip, by default the client's.
            return_exceptions: False raises the first error instead of yielding it, and drops the clips after it.
            **options: For all clips; see `DecodingOptions`.

        Raises:
            TypeError: `clips` is a single clip, or an item is none.
            Exception: the iterable's own, after the outcomes of the clips before it.
        """
        check_many(clips, concurrency, options)
        self._check_open()

        def transcribe(audio: Audio) -> Outcome:
            try:
                return self.transcribe(audio, model=model, timeout_s=timeout_s, **options)
            except (CarnelianClientError, OSError) as error:
                if not return_exceptions:
                    raise
                return without_frames(error)

        return _threads.map_in_order(transcribe, clips, concurrency, TAKEN_AHEAD * concurrency)

    def transcribe_long(
        self,
        audio: Audio,
        *,
        longest_piece_s: float = DEFAULT_LONGEST_S,
        concurrency: int = DEFAULT_CONCURRENCY,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Transcript:
        """Transcribe a recording of any length: it is cut in its pauses, and the pieces' transcripts are joined.

        It is decoded here, so soundfile must be installed. Beside the file's bytes, at most `2 * concurrency` pieces
        are held.

        Args:
            audio: As `transcribe` takes it.
            longest_piece_s: The longest piece, 5 to 60 s. Only the last one has less than half of it.
            concurrency: Pieces in flight at once.
            model: By default the client's.
            timeout_s: The time for each piece, by default the client's. Reading the file has no limit.
            **options: See `DecodingOptions`; `n_best` must be left out.

        Returns:
            A transcript whose times count from the beginning of the recording. Its `request_id` is the first piece's.

        Raises:
            InvalidAudio: the recording cannot be read.
            CarnelianClientError: what `transcribe` raises for a piece, `clip` saying where it begins and ends.
            OSError: the path cannot be read.
            ValueError: an argument that cannot work.
        """
        recording = Recording(audio, options, longest_piece_s)
        outcomes = self.transcribe_many(
            recording.pieces(), concurrency=concurrency, model=model, timeout_s=timeout_s, **options
        )
        with closing(outcomes):
            for outcome in outcomes:
                recording.add(outcome)
        return recording.transcript()

    def transcribe_stream(
        self,
        blocks: Iterable[Block],
        rate: int,
        *,
        interim_s: float | None = DEFAULT_INTERIM_S,
        pause_s: float = DEFAULT_PAUSE_S,
        longest_piece_s: float = DEFAULT_LONGEST_S,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Generator[Utterance | CarnelianClientError, None, None]:
        """Transcribe audio while it arrives: yield each utterance while it is spoken, and again when it has ended.

            for heard in client.transcribe_stream(microphone, 16000):
                if isinstance(heard, Utterance) and heard.is_final:
                    print(heard.start_s, heard.transcript.text)

        Silero's voice activity detector finds the utterances, on this side; silence between them is not sent. A final
        result is what `transcribe` gives for the utterance's samples, or the error that it would raise, whose `clip`
        says when that was spoken. Interim results are the same for what there is of it; those that fail are left out,
        and not tried again.

        The next block is taken when there is nothing to do for those before, so its source must keep what comes
        meanwhile, as a queue does that a microphone's callback fills.

        Args:
            blocks: Samples as they come, [samples] or [samples, channels] of one of the types of `Audio`; best of 0.05
                to 0.2 s each.
            rate: Their sample rate in Hz, at least 1,000.
            interim_s: An interim result comes after this many seconds of an utterance, and after as many more. It
                comes later if the server is slow. None leaves them out.
            pause_s: Seconds of silence that end an utterance, 0.1 to 5.
            longest_piece_s: A longer utterance is cut in its second half, where it is quietest, 5 to 60 s.
            model: By default the client's.
            timeout_s: The time for each request, by default the client's.
            **options: See `DecodingOptions`.

        Raises:
            AccessDenied, InvalidOption, ModelNotFound: as `transcribe` raises them, with the first result.
            InvalidAudio: a block is no audio, or of another type than the one before; or the rate is none.
            ModuleNotFoundError: the extra `live` is not installed.
            TypeError: `blocks` is no iterable of blocks.
            ValueError: an argument that cannot work.
            Exception: the iterable's own, after a final result for what it gave before.
        """
        check_blocks(blocks, (Iterable,), options)
        self._check_open()
        self._settings.choose_model(model)
        self._settings.deadline(timeout_s)
        stream = Stream(rate, interim_s, pause_s, longest_piece_s)

        def spans() -> Iterator[Span]:
            try:
                for block in blocks:
                    self._check_open()  # silence asks for nothing that would notice
                    yield from stream.add(block)
            except Exception:  # what was said before is told before
                yield from stream.end()
                raise
            yield from stream.end()

        def utterances() -> Generator[Utterance | CarnelianClientError, None, None]:
            for span in spans():
                outcome: Transcript | CarnelianClientError
                retry = self._settings.retry if span.is_final else ONCE
                try:
                    outcome = self._transcribe((span.samples, rate), model, timeout_s, None, options, retry)
                except CarnelianClientError as error:
                    outcome = without_frames(error)
                if heard := stream.heard(span, outcome):
                    yield heard

        return utterances()

    def is_ready(self, model: str | None = None, *, timeout_s: float | None = None) -> bool:
        """Say whether a model can be called now: False also if the server cannot be reached, or is stopping.

        Raises:
            ServerError: what answered is no Triton, or wants a key that was not sent, or not a right one.
        """
        self._check_open()
        try:
            return self._transport.is_model_ready(
                self._settings.choose_model(model), self._settings.deadline(timeout_s)
            )
        except (TransportError, ModelNotReady):
            return False

    def health(self, *, timeout_s: float | None = None) -> Health:
        """Ask the server how it is, once.

        Raises:
            CarnelianClientError: it did not say; ConnectError if it cannot be reached.
        """
        self._check_open()
        return self._transport.health(self._settings.deadline(timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """List what is in the server's model repository, stages of ensembles included.

        Raises:
            CarnelianClientError: there was no answer, or an error.
        """
        self._check_open()
        return self._transport.models(self._settings.deadline(timeout_s))

    def close(self) -> None:
        """Close the connection. Calls in flight in other threads end with an error."""
        self._closed.set()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be copied or sent to another process; make one there")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.url!r}, model={self._settings.model!r})"

    def _transcribe(
        self,
        audio: Audio,
        model: str | None,
        timeout_s: float | None,
        request_id: str | None,
        options: DecodingOptions,
        retry: RetryPolicy,
    ) -> Transcript:
        import tenacity

        self._check_open()
        deadline = self._settings.deadline(timeout_s)
        model = self._settings.choose_model(model)
        with about(describe_audio(audio), model, request_id):
            request = self._request(audio, model, request_id, options, deadline)
        retrying = tenacity.Retrying(sleep=tenacity.sleep_using_event(self._closed), **retry_arguments(retry, deadline))
        return retrying(self._transport.infer, request, deadline)

    def _request(
        self, audio: Audio, model: str, request_id: str | None, options: DecodingOptions, deadline: Deadline
    ) -> Request:
        """Read a clip and make its request; in a thread that can be left behind if reading may never end (a pipe)."""
        arguments = (audio, model, request_id, options, deadline)
        if not isinstance(audio, (str, PathLike)) or os.path.isfile(audio):  # noqa: PTH113  (no name breaks it)
            return self._settings.request(*arguments)
        return _threads.result(_threads.start(lambda: self._settings.request(*arguments)), deadline)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the client is closed; make a new one.")
