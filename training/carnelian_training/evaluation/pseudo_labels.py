"""Pseudo-labels: what a recogniser hears in clips that nobody has transcribed, to train on.

In: a model and a manifest, whose transcripts are not looked at; several processes share the clips out. Out: the clips
with the model's own transcripts.
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
    """The clips of a manifest, in its order, with what was heard as `text`, its `confidence` and whose it is.

    Args:
        model: with equal weights in every process.
        config: its configuration.
        manifest: NeMo JSON lines.
        process: this one among several, all of which must call.
        decoder: of the model's labels.
        options: that the decoder has read.

    Raises:
        ValueError: The file is not a manifest, or names no clips.
        RuntimeError: Clips cannot be decoded or are not what their lines say; all are named, before any is heard.
    """
    clips = read_clips(manifest)
    if process.leads:
        check_clean(clips, manifest, config.data.num_threads)
    heard: dict[int, tuple[str, float]] = {}
    for share, log_probs in score(model, config, clips, process):
        hypotheses = decoder.decode(log_probs, [options] * len(share))
        heard |= {i: (found.text, found.confidence) for i, found in zip(share, hypotheses, strict=True)}
    heard = process.union(heard)
    return [_labelled(clip, *heard[i], config.name) for i, clip in enumerate(clips)]


def _labelled(clip: Clip, text: str, confidence: float, model: str) -> Clip:
    return replace(clip, text=text, extra={**clip.extra, "confidence": confidence, "text_source": model})
