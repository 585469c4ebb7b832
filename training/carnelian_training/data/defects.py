"""The checks of clips for training and evaluation, shared by `carnelian-train validate` and the training run.

Every check returns a message, or a :class:`Defect` where messages are counted by their reason, that says what was found
and, where useful, what must hold; None if nothing is wrong. The limits are those of the run's configuration.
"""

import os
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from carnelian_training.config import Config
from carnelian_training.config_errors import listed
from carnelian_training.ctc.alignment import least_frames
from carnelian_training.ctc.spelling import choose_cases, quote
from carnelian_training.data.audio import check_regular, error_words
from carnelian_training.data.manifest import Clip
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.text import to_given_labels

SILENT_RMS = 10 ** (-90 / 20)
"""The root mean square, relative to full scale 1, below which a clip is silent: above a 16-bit recording of which only
the last bit changes."""


class Defect(NamedTuple):
    """What is wrong with a clip; as a string, its message."""

    reason: str
    """The same for all clips with the defect, but for a hint at what would mend it."""
    found: str = ""
    """What was found in this clip."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.found}" if self.found else self.reason


def duration_defect(clip: Clip, config: Config) -> Defect | None:
    """Return a message if the clip's duration in the manifest is too short or too long for training."""
    least, most = config.data.min_duration_s, config.data.max_duration_s
    if least <= clip.duration <= most:
        return None
    limits = f"outside {least:g} to {most:g} s (`data.min_duration_s`, `data.max_duration_s`)"
    return Defect("duration", f"{clip.duration:g} s, {limits}")


def text_defect(clip: Clip, config: Config) -> Defect | None:
    """Return a message if the transcript is empty or has characters that are not labels; None in pre-training."""
    if config.pretraining is not None:
        return None
    if not clip.text.strip():
        return Defect("empty transcript")
    labels = set(config.labels)
    unknown = set(clip.text) - labels
    if not unknown:
        return None
    hint = ""
    lower, upper = choose_cases(config.labels)
    # Where the labels' language has a case of its own, as Turkish, the usual functions write other words of a corpus.
    if lower is str.lower and not set(clip.text.lower()) - labels:
        hint = " (the text's lower case is within them)"
    elif upper is str.upper and not set(clip.text.upper()) - labels:
        hint = " (the text's upper case is within them)"
    elif not set(unicodedata.normalize("NFC", clip.text)) - labels:
        hint = " (the text's composed form, NFC, is within them)"
    elif to_given_labels(clip.text, "".join(config.labels)):
        hint = " (`to_given_labels` can write the text in them)"
    return Defect(f"characters outside the labels{hint}", quote("".join(sorted(unknown))))


def alignment_defect(clip: Clip, frames: int, config: Config) -> Defect | None:
    """Return a message if `frames` feature frames give no output frame, or too few for CTC to align the transcript.

    The CTC loss of such a clip would be infinite.
    """
    found = config.model.output_frames(frames)
    if found < 1:
        return Defect("too short for an output frame", f"{frames * config.features.hop_samples} samples")
    if config.pretraining is not None or (needed := least_frames(clip.text)) <= found:
        return None
    return Defect("transcript longer than CTC can align", f"it needs {needed} output frames, the clip has {found}")


def planned_frames(clip: Clip, config: Config) -> int:
    """Return the clip's number of feature frames at the fastest speed, from the manifest's duration."""
    return int(clip.duration / config.augment.fastest * SAMPLE_RATE_HZ) // config.features.hop_samples + 1


def sound_defect(clip: Clip, samples: int, is_finite: bool) -> str | None:
    """Return a message if the decoded sound has no samples, another duration than its manifest, or is not finite.

    `samples` is their number at 16 kHz, before a change of speed.
    """
    if samples == 0:
        return "no samples"
    duration_s = samples / SAMPLE_RATE_HZ
    if abs(duration_s - clip.duration) > duration_tolerance_s(clip):
        may_be_stretch = clip.offset is None and duration_s > clip.duration
        hint = "; a stretch of a longer file has an `offset`, be it 0" if may_be_stretch else ""
        return f"lasts {duration_s:.2f} s, but its manifest says {clip.duration:.2f} s{hint}"
    if not is_finite:
        return "samples that are no finite numbers"
    return None


def silence_defect(level: float) -> str | None:
    """Return a message if the clip is silent; `level` is its root mean square without its constant offset."""
    silent = f"silent: root mean square {level:.1e} of full scale, a constant offset apart"
    return silent if level < SILENT_RMS else None


def refusal(bad: Sequence[tuple[Clip, str]], total: int, manifest: Path | None) -> str:
    """Return the message about clips, of a manifest unless None, of which some are `bad`, each with the reason."""
    named = [f"{clip.title}: {defect}" for clip, defect in bad]
    is_lost = not all(os.path.exists(clip.audio_filepath) for clip, _ in bad)  # noqa: PTH110  (no name breaks it)
    where = " (a relative path begins at the manifest's own folder)" if is_lost else ""
    head = f"{manifest or 'a manifest'} must name clean clips, but {len(named)} of {total} are bad{where}:"
    return "\n  ".join([head, *listed(named)])


def check_files(clips: Sequence[Clip], num_threads: int, manifest: Path | None) -> None:
    """Check that the files of clips are there, so that a wrong path is told before minutes of work.

    Raises:
        RuntimeError: Some are missing, or are folders or pipes; see :func:`refusal`.
    """

    def file_defect(path: Path) -> str | None:
        try:
            check_regular(path)
        except (OSError, RuntimeError) as error:
            return error_words(error)
        return None

    files = list(dict.fromkeys(clip.audio_filepath for clip in clips))
    with ThreadPoolExecutor(num_threads) as pool:  # a file system on a network takes milliseconds to answer
        found = dict(zip(files, pool.map(file_defect, files), strict=True))
    if bad := [(clip, words) for clip in clips if (words := found[clip.audio_filepath])]:
        raise RuntimeError(refusal(bad, len(clips), manifest))


def duration_tolerance_s(clip: Clip) -> float:
    """Return by how many seconds a file's duration may differ from the manifest's.

    Durations in manifests are often rounded, to 0.1 s at worst, or ignore the codec's delay.
    """
    return 0.1 + 0.01 * clip.duration
