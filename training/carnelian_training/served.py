"""Evaluation of a running server, over the way that a user's clips take: files through the SDK.

Training needs no client, so the SDK is imported here alone and when asked for; who evaluates a server has it.
"""

from pathlib import Path

from carnelian_training.evaluate import Evaluation, clips_to_evaluate

CONCURRENCY = 8


def evaluate_served(url: str, model: str, manifest: Path) -> Evaluation:
    """Transcribe a manifest with a server; the transcripts are those of :func:`evaluate` on what is served.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: name of the ensemble.
        manifest: NeMo JSON lines.

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
    with CarnelianClient(url, model=model) as client:
        if not client.is_ready():
            raise RuntimeError(f"the server must be running and have the model ready, but {url} has no {model!r} ready")
        outcomes = list(client.transcribe_many([clip.audio_filepath for clip in clips], concurrency=CONCURRENCY))
    transcripts = [outcome.text if isinstance(outcome, Transcript) else "" for outcome in outcomes]
    failures = {i: str(outcome) for i, outcome in enumerate(outcomes) if not isinstance(outcome, Transcript)}
    return Evaluation(clips, transcripts, failures)
