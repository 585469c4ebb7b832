"""What makes a clip useless for training or evaluation: one definition, for `validate` and for the training run.

Every check answers in words: what was found and what would have to hold; None if nothing is wrong.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from carnelian_training.config import LABELS, AugmentConfig, Config, DataConfig
from carnelian_training.ctc.alignment import least_frames
from carnelian_training.data.manifest import Clip
from carnelian_training.features import SAMPLE_RATE_HZ, FeatureSettings

SILENT_RMS = 10 ** (-90 / 20)
"""Root mean square, full scale 1. A 16-bit recording of which only the last bit flickers stays below it."""


@dataclass(frozen=True)
class Limits:
    """What a clip to train on must keep."""

    labels: frozenset[str] | None
    """None: transcripts are not read."""
    hop_samples: int
    output_frames: Callable[[int], int]
    """Output frames of the network for a clip's frames of features."""
    min_duration_s: float
    max_duration_s: float
    fastest: float
    """The highest speed that training plays a clip at."""

    @classmethod
    def of(cls, config: Config) -> "Limits":
        """Those of a configuration."""
        return cls(
            frozenset(config.labels) if config.pretraining is None else None,
            config.features.hop_samples,
            config.model.output_frames,
            config.data.min_duration_s,
            config.data.max_duration_s,
            config.augment.fastest,
        )

    @classmethod
    def by_default(cls) -> "Limits":
        """Those of a configuration that says nothing about them, at 20 ms per output frame."""
        return cls(
            frozenset(LABELS),
            FeatureSettings().hop_samples,
            lambda frames: -(-frames // 2),
            DataConfig().min_duration_s,
            DataConfig().max_duration_s,
            AugmentConfig().fastest,
        )


@dataclass(frozen=True)
class Heard:
    """What decoding a clip gave."""

    samples: int
    """At 16 kHz and natural speed."""
    is_finite: bool
    """Whether all samples are numbers."""


def duration_defect(clip: Clip, limits: Limits) -> str | None:
    """Too short or too long to train on, by its manifest."""
    if limits.min_duration_s <= clip.duration <= limits.max_duration_s:
        return None
    return f"{clip.duration:g} s, outside {limits.min_duration_s:g} to {limits.max_duration_s:g} s"


def text_defect(clip: Clip, limits: Limits) -> str | None:
    """A transcript that cannot be spelt with the labels."""
    if limits.labels is None:
        return None
    if not clip.text.strip():
        return "empty transcript"
    unknown = set(clip.text) - limits.labels
    if not unknown:
        return None
    hint = ""
    if not set(clip.text.lower()) - limits.labels:
        hint = " (the text's lower case is within them)"
    elif not set(clip.text.upper()) - limits.labels:
        hint = " (the text's upper case is within them)"
    elif not set(unicodedata.normalize("NFC", clip.text)) - limits.labels:
        hint = " (the text's composed form, NFC, is within them)"
    return f"characters outside the labels{hint}: {''.join(sorted(unknown))!r}"


def alignment_defect(clip: Clip, frames: int, limits: Limits) -> str | None:
    """No output frame of `frames` of features, or a transcript that CTC cannot align: its loss would be infinite."""
    if limits.output_frames(frames) < 1:
        return f"too short for an output frame: {frames * limits.hop_samples} samples"
    if limits.labels is None:
        return None
    needed, found = least_frames(clip.text), limits.output_frames(frames)
    if needed <= found:
        return None
    return f"transcript longer than CTC can align: it needs {needed} output frames, the clip has {found}"


def planned_frames(clip: Clip, limits: Limits) -> int:
    """Feature frames at the fastest speed, by the manifest's duration."""
    return int(clip.duration / limits.fastest * SAMPLE_RATE_HZ) // limits.hop_samples + 1


def sound_defect(clip: Clip, heard: Heard) -> str | None:
    """What was heard is not the sound of the manifest's line."""
    if heard.samples == 0:
        return "no samples"
    duration_s = heard.samples / SAMPLE_RATE_HZ
    if abs(duration_s - clip.duration) > duration_tolerance_s(clip):
        may_be_stretch = clip.offset is None and duration_s > clip.duration
        hint = "; a stretch of a longer file has an `offset`, be it 0" if may_be_stretch else ""
        return f"lasts {duration_s:.2f} s, but its manifest says {clip.duration:.2f} s{hint}"
    if not heard.is_finite:
        return "samples that are no finite numbers"
    return None


def silence_defect(level: float) -> str | None:
    """Nothing to hear, by the root mean square of the samples without their constant offset."""
    silent = f"silent: root mean square {level:.1e} of full scale, a constant offset apart"
    return silent if level < SILENT_RMS else None


def duration_tolerance_s(clip: Clip) -> float:
    """How far a file may be off its manifest: durations are often rounded, to 0.1 s at worst, or ignore codec delay."""
    return 0.1 + 0.01 * clip.duration
