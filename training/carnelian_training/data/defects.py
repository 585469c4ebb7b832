"""The checks of clips for training and evaluation, shared by `carnelian-train validate` and the training run.

Every check returns a message that says what was found and, where useful, what must hold; None if nothing is wrong.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from carnelian_training.config import LABELS, AugmentConfig, Config, DataConfig
from carnelian_training.ctc.alignment import least_frames
from carnelian_training.data.manifest import Clip
from carnelian_training.features import SAMPLE_RATE_HZ, FeatureSettings

SILENT_RMS = 10 ** (-90 / 20)
"""The root mean square, relative to full scale 1, below which a clip is silent: above a 16-bit recording of which only
the last bit changes."""


@dataclass(frozen=True)
class Limits:
    """The limits that a clip must keep to be used in training."""

    labels: frozenset[str] | None
    """The characters that a transcript may have. None: transcripts are not checked."""
    hop_samples: int
    output_frames: Callable[[int], int]
    """Returns the network's output frames for a number of feature frames."""
    min_duration_s: float
    max_duration_s: float
    fastest: float
    """The highest factor by which training speeds a clip up."""

    @classmethod
    def of(cls, config: Config) -> "Limits":
        """Return the limits of a configuration."""
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
        """Return the limits of a configuration that sets none of them, for 20 ms per output frame."""
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
    """What the check of a clip needs to know of its decoded sound."""

    samples: int
    """The number of samples at 16 kHz, before a change of speed."""
    is_finite: bool
    """Whether all samples are finite numbers."""


def duration_defect(clip: Clip, limits: Limits) -> str | None:
    """Return a message if the clip's duration in the manifest is too short or too long for training."""
    if limits.min_duration_s <= clip.duration <= limits.max_duration_s:
        return None
    return f"{clip.duration:g} s, outside {limits.min_duration_s:g} to {limits.max_duration_s:g} s"


def text_defect(clip: Clip, limits: Limits) -> str | None:
    """Return a message if the transcript is empty or has characters that are not labels."""
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
    """Return a message if `frames` feature frames give no output frame, or too few for CTC to align the transcript.

    The CTC loss of such a clip would be infinite.
    """
    if limits.output_frames(frames) < 1:
        return f"too short for an output frame: {frames * limits.hop_samples} samples"
    if limits.labels is None:
        return None
    needed, found = least_frames(clip.text), limits.output_frames(frames)
    if needed <= found:
        return None
    return f"transcript longer than CTC can align: it needs {needed} output frames, the clip has {found}"


def planned_frames(clip: Clip, limits: Limits) -> int:
    """Return the clip's number of feature frames at the fastest speed, from the manifest's duration."""
    return int(clip.duration / limits.fastest * SAMPLE_RATE_HZ) // limits.hop_samples + 1


def sound_defect(clip: Clip, heard: Heard) -> str | None:
    """Return a message if the decoded sound has no samples, another duration than its manifest, or is not finite."""
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
    """Return a message if the clip is silent; `level` is its root mean square without its constant offset."""
    silent = f"silent: root mean square {level:.1e} of full scale, a constant offset apart"
    return silent if level < SILENT_RMS else None


def duration_tolerance_s(clip: Clip) -> float:
    """Return by how many seconds a file's duration may differ from the manifest's.

    Durations in manifests are often rounded, to 0.1 s at worst, or ignore the codec's delay.
    """
    return 0.1 + 0.01 * clip.duration
