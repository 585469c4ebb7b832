"""Pseudo-labels: a recogniser's transcripts of untranscribed clips, to train on.

Input: a model and a manifest, whose transcripts are ignored; several processes share the clips. Output: the clips with
the model's transcripts, without those that cannot be read.
"""

from dataclasses import replace
from pathlib import Path

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.data.manifest import Clip, read_clips
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
) -> tuple[list[Clip], int]:
    """Transcribe the clips of a manifest; one that cannot be decoded or does not match its line is logged and left out.

    All processes must call this, with equal weights.

    Returns:
        The clips in the manifest's order, with the transcript as `text`, and the fields `confidence` and `text_source`,
        the name of the model; and the number of clips left out.

    Raises:
        ValueError: The file is not a manifest, or names no clips.
        RuntimeError: All clips were left out.
    """
    clips = read_clips(manifest)
    heard: dict[int, tuple[str, float]] = {}
    for share, log_probs in score(model, config, clips, process, manifest, strict=False):
        hypotheses = decoder.decode(log_probs, [options] * len(share))
        heard |= {i: (found.text, found.confidence) for i, found in zip(share, hypotheses, strict=True)}
    heard = process.union(heard)
    if not heard:
        raise RuntimeError(f"{manifest} must name clips that can be read, but none of its {len(clips)} can")
    return [_labelled(clips[i], *heard[i], config.name) for i in sorted(heard)], len(clips) - len(heard)


def _labelled(clip: Clip, text: str, confidence: float, model: str) -> Clip:
    return replace(clip, text=text, extra={**clip.extra, "confidence": confidence, "text_source": model})
