"""Evaluation of a running server as users call it: files sent through the SDK.

Training does not depend on the SDK, so it is imported only here, when a server is evaluated.
"""

import logging
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from carnelian_training.ctc import OptionError
from carnelian_training.data.audio import error_words
from carnelian_training.data.decoding import read_clip
from carnelian_training.data.defects import check_files
from carnelian_training.data.manifest import Clip, clips_to_evaluate
from carnelian_training.evaluation.error_rates import Evaluation
from carnelian_training.progress import clip_progress

if TYPE_CHECKING:
    from carnelian_client import CarnelianClient, DecodingOptions

logger = logging.getLogger(__name__)

CONCURRENCY = 8
COUNTED_WITHIN_S = 5.0
"""The longest wait in seconds for Triton to count requests, which it does after answering them."""


def evaluate_served(url: str, model: str, manifest: Path, options: Mapping[str, Any] | None = None) -> Evaluation:
    """Transcribe a manifest with a server; `evaluate` gives the same transcripts from the served checkpoint.

    `url` is host:port of the server's gRPC endpoint, and `options` are those that differ from the server's own.

    Raises:
        RuntimeError: The SDK is not installed, the server has no such model ready, or sound files are missing.
        OptionError: The server does not know an option.
        ValueError: The file is not a manifest, or its transcripts have no words.
    """
    clips = clips_to_evaluate(manifest)
    check_files(clips, CONCURRENCY, manifest)
    with connect(url, model) as client:
        evaluation = transcribe_served(client, clips, options or {})
    warn_of_accents([clip.text for clip in clips], evaluation.transcripts)
    return evaluation


def warn_of_accents(references: Sequence[str], transcripts: Sequence[str]) -> None:
    """Warn of references whose accents are written otherwise than those of the transcripts, composed or decomposed.

    A server does not say what its labels are, but transcripts are spelled with them. Labels may mix the two forms.
    """
    heard = " ".join(transcripts)
    if unicodedata.is_normalized("NFC", heard):
        others = sum(not unicodedata.is_normalized("NFC", text) for text in references)
        forms = "decomposed characters (NFD)", "composed"
    elif unicodedata.is_normalized("NFD", heard):
        others = sum(not unicodedata.is_normalized("NFD", text) for text in references)
        forms = "composed characters (NFC)", "decomposed"
    else:
        return
    if others and heard.strip():
        logger.warning(
            "%d of %d references hold %s, which count as errors: transcripts are %s; `to_given_labels` writes them",
            *(others, len(references), *forms),
        )


def connect(url: str, model: str) -> "CarnelianClient":
    """Connect to a server that has the model ready, and return the client.

    Raises:
        RuntimeError: The SDK is not installed, or the server has no such model ready.
    """
    try:
        from carnelian_client import CarnelianClient, CarnelianClientError
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"evaluating a server needs the SDK, but {error.name} is not installed; install carnelian-client from "
            "where carnelian-training came (in a clone: pip install ./client)"
        ) from error
    client = CarnelianClient(url, model=model)
    try:
        if client.is_ready():
            return client
        # Evaluation asks for models with a stage that decodes.
        ready = {entry.name for entry in client.models() if entry.is_ready}
        why = f"; it serves {', '.join(sorted(name for name in ready if f'{name}_ctc' in ready)) or 'no recogniser'}"
    except CarnelianClientError as error:  # it does not answer, or is shutting down
        why = f": {error}"
    client.close()
    raise RuntimeError(f"the server must be running and have the model ready, but {url} has no {model!r} ready{why}")


def transcribe_served(client: "CarnelianClient", clips: Sequence[Clip], options: Mapping[str, Any]) -> Evaluation:
    """Transcribe clips with a server, `CONCURRENCY` at a time; a clip that cannot be read here is a failure.

    Raises:
        OptionError: The server does not know an option, or not this value: no clip would get a transcript.
    """
    from carnelian_client import CarnelianClientError, InvalidOption, Transcript

    unread: dict[Clip, str] = {}
    failures: dict[int, str] = {}
    sent: list[int] = []

    def recordings() -> Iterator[Path | bytes]:
        for i, clip in enumerate(clips):
            # A segment of a longer file is sent as a file of its own.
            recording = clip.audio_filepath if clip.offset is None else read_clip(clip, unread).tobytes()
            if clip in unread:
                failures[i] = unread[clip]
                continue
            sent.append(i)
            yield recording

    decoding = cast("DecodingOptions", options)  # the server says which options are wrong
    answers = client.transcribe_many(recordings(), concurrency=CONCURRENCY, **decoding)
    outcomes = []
    with closing(answers), clip_progress(len(clips), leave=False) as progress:
        for outcome in answers:
            if isinstance(outcome, InvalidOption):
                raise OptionError(outcome.message)
            outcomes.append(outcome)
            progress(1)
    heard = [""] * len(clips)
    for i, outcome in zip(sent, outcomes, strict=True):
        if isinstance(outcome, Transcript):
            heard[i] = outcome.text
        elif isinstance(outcome, CarnelianClientError):  # the caller names the file, too
            failures[i] = str(outcome).removeprefix(f"{outcome.clip}: ")
        else:
            failures[i] = error_words(outcome)
    return Evaluation(clips, heard, dict(sorted(failures.items())))


class DecodingClock:
    """Measures how long a server's stage `<model>_ctc` has worked, by Triton's statistics; copying tensors is included.

    Every method raises RuntimeError if the server gives no figures: it has ended, has no such stage, or does not count
    its answers.
    """

    def __init__(self, url: str, model: str) -> None:
        """Connect to the server and start counting."""
        from tritonclient.grpc import InferenceServerClient  # comes with the SDK

        self._client, self._stage = InferenceServerClient(url), f"{model}_ctc"
        self.restart()

    def __enter__(self) -> "DecodingClock":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def restart(self) -> None:
        """Start counting again from zero."""
        self._started = self._read()

    def elapsed_s(self, rows: int) -> float:
        """Return the seconds that the stage has worked on `rows` answered rows since the start; a batch counts once."""
        deadline = time.monotonic() + COUNTED_WITHIN_S
        while (now := self._read())[0] - self._started[0] < rows and time.monotonic() < deadline:
            time.sleep(0.02)
        if (counted := now[0] - self._started[0]) < rows:
            raise RuntimeError(f"the server must have counted {rows} rows of {self._stage}, but has {counted}")
        return (now[1] - self._started[1]) / 1e9

    def _read(self) -> tuple[int, int]:
        """Return the stage's total rows and its total time in nanoseconds."""
        from tritonclient.utils import InferenceServerException

        try:
            (statistics,) = self._client.get_inference_statistics(self._stage).model_stats
        except InferenceServerException as error:
            raise RuntimeError(
                f"the server must count the time of {self._stage}, but says: {error.message()}"
            ) from error
        rows = elapsed_ns = 0
        for batch in statistics.batch_stats:
            rows += batch.batch_size * batch.compute_infer.count
            elapsed_ns += batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns
        return rows, elapsed_ns
