"""Pseudo-labels: a recogniser's transcripts of untranscribed clips, to train on.

Input: a model and a manifest, whose transcripts are ignored; several processes share the clips. Output: the clips with
the model's transcripts.
"""

from dataclasses import replace
from pathlib import Path

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.manifest import Clip, read_clips
from carnelian_training.data.validate import check_clean
from carnelian_training.distributed import Process
from carnelian_training.evaluation.evaluate import score
from carnelian_training.models.network import CtcNetwork


def transcribe(
    model: CtcNetwork,
    config: Config,
    manifest: Path,
    process: Process,
    decoder: ctc.Decoder,
    options: ctc.Options,
) -> list[Clip]:
    """Transcribe the clips of a manifest.

    All processes must call this, with equal weights.

    Returns:
        The clips in the manifest's order, with the transcript as `text`, and the fields `confidence` and `text_source`,
        the name of the model.

    Raises:
        ValueError: The file is not a manifest, or names no clips.
        RuntimeError: Clips cannot be decoded or do not match the manifest; the message names all, before any is
            transcribed.
    """
    clips = read_clips(manifest)
    check_clean(clips, manifest, config.data.num_threads, process)
    heard: dict[int, tuple[str, float]] = {}
    for share, log_probs in score(model, config, clips, process):
        hypotheses = decoder.decode(log_probs, [options] * len(share))
        heard |= {i: (found.text, found.confidence) for i, found in zip(share, hypotheses, strict=True)}
    heard = process.union(heard)
    return [_labelled(clip, *heard[i], config.name) for i, clip in enumerate(clips)]


def _labelled(clip: Clip, text: str, confidence: float, model: str) -> Clip:
    return replace(clip, text=text, extra={**clip.extra, "confidence": confidence, "text_source": model})
