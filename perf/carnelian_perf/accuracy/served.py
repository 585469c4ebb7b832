"""Word and character error rates of a running server, without torch, which `carnelian-train evaluate --url` needs.

Clips are sent through the SDK, as a user's are. In: a NeMo manifest. Out: :class:`Accuracy`, whose rates equal those of
`carnelian-train evaluate` if the served model is the evaluated one.
"""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
from carnelian_client import AccessDenied, CarnelianClient, CarnelianClientError, Outcome, Transcript

from carnelian_perf.manifest import Utterance, read_manifest
from carnelian_perf.whole_file import write_whole

CONCURRENCY = 8


@dataclass(frozen=True)
class ErrorRates:
    """Word and character error rates over several utterances, as fractions; NaN if the references have no words."""

    wer: float
    cer: float
    utterances: int
    words: int
    insertions: int
    """Number of words that were transcribed, but not said."""


@dataclass(frozen=True)
class Accuracy:
    """The server's answers to the clips of a manifest."""

    utterances: Sequence[Utterance]
    outcomes: Sequence[Outcome]
    wall_s: float

    @property
    def failures(self) -> list[CarnelianClientError | OSError]:
        """The errors of the clips that have no transcript; each error names its clip."""
        return [outcome for outcome in self.outcomes if not isinstance(outcome, Transcript)]

    @property
    def sources(self) -> list[str]:
        """The distinct `source` fields, in order of appearance."""
        return list(dict.fromkeys(u.source for u in self.utterances if u.source is not None))

    @property
    def transcribed_s(self) -> float:
        """Seconds of audio that have a transcript, by the server's count: a manifest's `duration` may be wrong."""
        return sum(outcome.duration_s for outcome in self.outcomes if isinstance(outcome, Transcript))

    def error_rates(self, source: str | None = None) -> ErrorRates:
        """Compute error rates over all utterances, or those of a source; a failed clip counts as an empty text."""
        pairs = [
            (u.text, _text(outcome))
            for u, outcome in zip(self.utterances, self.outcomes, strict=True)
            if source is None or u.source == source
        ]
        # jiwer takes a tab or a no-break space for a letter.
        references, transcripts = ([" ".join(text.split()) for text in texts] for texts in zip(*pairs, strict=True))
        found = jiwer.process_words(references, transcripts)
        said = found.hits + found.substitutions + found.deletions
        return ErrorRates(
            # If there are no words, jiwer's rates are counts of insertions.
            wer=found.wer if said else math.nan,
            cer=jiwer.cer(references, transcripts) if said else math.nan,
            utterances=len(pairs),
            words=said,
            insertions=found.insertions,
        )

    def write(self, path: Path) -> None:
        """Write JSON lines: `audio_filepath`, `duration`, `text`, `pred_text`; `source` and `error` where they are."""
        lines = []
        for u, outcome in zip(self.utterances, self.outcomes, strict=True):
            row: dict[str, Any] = {
                "audio_filepath": str(u.audio_filepath),
                "duration": u.duration_s,
                "text": u.text,
                "pred_text": _text(outcome),
            }
            if u.source is not None:
                row["source"] = u.source
            if not isinstance(outcome, Transcript):
                row["error"] = str(outcome)
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        write_whole(path, "".join(lines))


def measure(manifest: Path, url: str, model: str) -> Accuracy:
    """Transcribe every clip of a manifest, a few at a time.

    Raises:
        ValueError: The file is not a manifest, or holds no words.
        RuntimeError: There is no such model at the server, or no server.
    """
    utterances = read_manifest(manifest, with_texts=True)
    if not any(u.text.split() for u in utterances):
        raise ValueError(f"a manifest must hold at least one word, but {manifest} has none")
    with CarnelianClient(url, model=model) as client:
        why = ""
        try:
            is_ready = client.is_ready()
        except AccessDenied:  # whose advice is an option that there is not here
            is_ready, why = False, "; it refuses the call, as a gateway does that wants a key"
        except CarnelianClientError as error:
            is_ready, why = False, f": {error}"
        if not is_ready:
            if ready := list_ready(client):
                raise RuntimeError(f"the model must be served and ready, but {model!r} is not; {url} has {ready}")
            raise RuntimeError(
                "the server must be running, without TLS and without an API key, and have the model ready, but "
                f"{url} has no {model!r} ready, or is not the address of its gRPC endpoint (port 8001, unless the "
                f"server was told another){why}"
            )
        began = time.perf_counter()
        outcomes = list(client.transcribe_many([u.audio_filepath for u in utterances], concurrency=CONCURRENCY))
        return Accuracy(utterances, outcomes, time.perf_counter() - began)


def list_ready(client: CarnelianClient) -> str:
    """List the models that are ready at a server; empty if it does not tell, as with the Helm chart, or if none is."""
    with contextlib.suppress(CarnelianClientError):
        return ", ".join(entry.name for entry in client.models(timeout_s=5.0) if entry.is_ready)
    return ""


def _text(outcome: Outcome) -> str:
    return outcome.text if isinstance(outcome, Transcript) else ""
