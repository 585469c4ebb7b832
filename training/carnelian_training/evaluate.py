"""Exact evaluation: every clip of a manifest once, greedy decoding, word and character error rates by jiwer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer
import torch

from carnelian_training import ctc
from carnelian_training.config import Config
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.loading import Item, group, load
from carnelian_training.manifest import Clip, read_manifest
from carnelian_training.models.network import CtcNetwork


@dataclass(frozen=True)
class ErrorRates:
    """Over all clips together, as fractions."""

    wer: float
    cer: float
    clips: int
    words: int


@dataclass(frozen=True)
class Evaluation:
    """What was heard, in the order of the manifest."""

    clips: Sequence[Clip]
    transcripts: Sequence[str]

    def error_rates(self, source: str | None = None) -> ErrorRates:
        """Over all clips, or over those whose manifest line has this `source`."""
        pairs = [
            (clip.text, transcript)
            for clip, transcript in zip(self.clips, self.transcripts, strict=True)
            if source is None or clip.extra.get("source") == source
        ]
        references, transcripts = map(list, zip(*pairs, strict=True))
        return ErrorRates(
            jiwer.wer(references, transcripts),
            jiwer.cer(references, transcripts),
            len(pairs),
            sum(len(reference.split()) for reference in references),
        )

    def sources(self) -> list[str]:
        """The distinct `source` fields, in order of appearance."""
        return list(dict.fromkeys(str(clip.extra["source"]) for clip in self.clips if "source" in clip.extra))


def frame_duration_s(config: Config) -> float:
    """Seconds per output frame of a model."""
    return config.model.stride * config.features.hop_samples / SAMPLE_RATE_HZ


@torch.inference_mode()
def evaluate(model: CtcNetwork, config: Config, manifest: Path) -> Evaluation:
    """Transcribe a manifest in batches of about equal length; the result does not depend on the batches.

    Raises:
        ValueError: The manifest is none, or names no clips.
    """
    model.eval()
    device = next(model.parameters()).device
    clips = read_manifest(manifest)
    if not clips:
        raise ValueError(f"a manifest must name at least one clip to evaluate on, but {manifest} has none")
    order = sorted(range(len(clips)), key=lambda i: clips[i].duration)
    transcripts = [""] * len(clips)
    position = 0
    batches = group([Item(clips[i]) for i in order], config.data.batch_s)
    for batch in load(batches, config.features, config.data.num_threads):
        log_probs, lengths = model(batch.features.to(device), batch.lengths.to(device))
        labels, frame_s = list(config.labels), frame_duration_s(config)
        hypotheses = ctc.greedy(log_probs.cpu().numpy(), lengths.cpu().numpy(), labels, frame_s)
        for hypothesis in hypotheses:
            transcripts[order[position]] = hypothesis.text
            position += 1
    return Evaluation(clips, transcripts)
