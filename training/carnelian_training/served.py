"""Evaluation of a running server, over the way that a user's clips take: files through the SDK.

Training needs no client, so the SDK is imported here alone and when asked for; who evaluates a server has it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from carnelian_training.evaluate import Evaluation, clips_to_evaluate
from carnelian_training.loading import read_clip
from carnelian_training.manifest import Clip

if TYPE_CHECKING:
    from carnelian_client import DecodingOptions

CONCURRENCY = 8


def evaluate_served(url: str, model: str, manifest: Path, options: Mapping[str, str] | None = None) -> Evaluation:
    """Transcribe a manifest with a server; the transcripts are those of :func:`evaluate` on what is served.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: name of the ensemble.
        manifest: NeMo JSON lines.
        options: of the decoder, where they differ from the server's defaults.

    Raises:
        RuntimeError: The SDK is not installed, or the server has no such model ready.
        ValueError: The manifest is none, or there is nothing to compare with.
    """
    try:
        from carnelian_client import CarnelianClient, Transcript
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"evaluating a server needs the SDK, but {error.name} is not installed: pip install carnelian-client "
            "(`pip install -e client` in the repository)"
        ) from error
    clips = clips_to_evaluate(manifest)
    failed: dict[Clip, str] = {}

    def recordings() -> Iterator[Path | bytes]:
        for clip in clips:  # a segment of a longer file goes as a file of its own
            yield clip.audio_filepath if clip.offset is None else read_clip(clip, failed).tobytes()

    with CarnelianClient(url, model=model) as client:
        if not client.is_ready():
            raise RuntimeError(f"the server must be running and have the model ready, but {url} has no {model!r} ready")
        decoding = cast("DecodingOptions", options or {})  # the server says which options are wrong
        outcomes = list(client.transcribe_many(recordings(), concurrency=CONCURRENCY, **decoding))
    failures = {i: str(outcome) for i, outcome in enumerate(outcomes) if not isinstance(outcome, Transcript)}
    failures |= {i: failed[clip] for i, clip in enumerate(clips) if clip in failed}
    heard = [outcome.text if isinstance(outcome, Transcript) else "" for outcome in outcomes]
    return Evaluation(clips, ["" if i in failures else text for i, text in enumerate(heard)], failures)
