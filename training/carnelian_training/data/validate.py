"""Check every clip of a manifest before a training run: which clips cannot be used, and why.

Input: manifests, or configurations that name some. Output: a :class:`ManifestReport` for each manifest and, on request,
a cleaned manifest. The checks are those of training (:mod:`carnelian_training.data.defects`), and one of the sampling
rate.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.pipeline import DataNode, Pipeline

from carnelian_training.config import Config
from carnelian_training.data.audio import Encoded
from carnelian_training.data.decoding import decode, level, read_batch, run_surviving
from carnelian_training.data.defects import (
    alignment_defect,
    duration_defect,
    planned_frames,
    refusal,
    silence_defect,
    sound_defect,
    text_defect,
)
from carnelian_training.data.manifest import Clip, read_manifest_leniently, write_manifest
from carnelian_training.data.plan import Item, group
from carnelian_training.distributed import Process
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.models.blocks import StageConfig
from carnelian_training.models.quartznet import QuartzNetConfig
from carnelian_training.progress import clip_progress
from carnelian_training.run_config import load_config

SECONDS_AT_ONCE = 300.0
DEFAULTS = Config(
    name="defaults", model=QuartzNetConfig(stages=(StageConfig(filters=1, kernel=1, stride=2, residual=False),))
)
"""The configuration for manifests without one: the default labels and limits, and 20 ms per output frame."""


@dataclass(frozen=True)
class ManifestCheck:
    """A manifest to check, with the configuration that gives its labels and limits, and its purpose."""

    manifest: Path
    config: Config
    for_training: bool = True
    """Whether the clips are for training; for evaluation, durations and alignments are not checked."""
    training: tuple[Path, ...] = ()
    """The manifests of training, whose clips the manifest should not share."""


@dataclass(frozen=True)
class ManifestReport:
    """The result of checking one manifest."""

    manifest: Path
    clean: list[Clip] = field(default_factory=list)
    """The clips without a defect."""
    defects: list[tuple[str, str, str]] = field(default_factory=list)
    """The kind of each defect, its clip or line, and the message that says what is wrong."""
    remarks: Counter[str] = field(default_factory=Counter)
    """The number of clips with what may be meant so, by its words."""

    @property
    def kinds(self) -> Counter[str]:
        """The number of clips with each kind of defect."""
        return Counter(kind for kind, _, _ in self.defects)

    def write_clean(self) -> Path:
        """Write the clean clips beside the manifest, as `<name>.clean.jsonl`."""
        target = self.manifest.with_name(f"{self.manifest.stem}.clean.jsonl")
        write_manifest(target, self.clean)
        return target


def list_checks(paths: Sequence[Path], overrides: tuple[str, ...] = ()) -> list[ManifestCheck]:
    """List the manifests to check: named ones with the default limits, and those of YAML files with the files' limits.

    `overrides`, as of `fit`, apply to each YAML file.

    Raises:
        ConfigError: A YAML file is wrong.
        ValueError: A YAML file names no manifest, or there are overrides without a YAML file.
    """
    found = []
    configs = [path for path in paths if path.suffix in {".yaml", ".yml"}]
    if overrides and not configs:
        raise ValueError("--set must come with a YAML file, but there is none: name the file that it changes")
    for path in paths:
        if path not in configs:
            found.append(ManifestCheck(path, DEFAULTS))
            continue
        config = load_config(path, overrides)
        if not config.data.train and config.data.dev is None:
            raise ValueError(f"{path} must name manifests, in `data.train` or `data.dev`, but names none; give --set")
        found += [ManifestCheck(manifest.path, config) for manifest in config.data.train]
        if config.data.dev is not None:
            training = tuple(manifest.path for manifest in config.data.train)
            found.append(ManifestCheck(config.data.dev, config, for_training=False, training=training))
    return found


def validate(
    check: ManifestCheck, *, min_rate_hz: int = SAMPLE_RATE_HZ, num_threads: int | None = None
) -> ManifestReport:
    """Decode every clip of a manifest and collect its defects.

    Files with a sampling rate below `min_rate_hz` are reported. They can be decoded, but the upper mel bands of an 8
    kHz recording, for example, are empty. By default, every core of this process decodes.

    Raises:
        ValueError: The manifest, or one of training, cannot be read.
    """
    clips, mistakes = read_manifest_leniently(check.manifest)
    report = ManifestReport(check.manifest, defects=[("no clip", line, "") for line in mistakes])
    if not clips and not mistakes:
        report.defects.append(("empty", str(check.manifest), "no clips at all"))
    trained = {_identity(clip) for manifest in check.training for clip in read_manifest_leniently(manifest)[0]}
    texts: dict[int, str] = {}
    for clip, sounds in _listen(clips, check.manifest, min_rate_hz, num_threads or len(os.sched_getaffinity(0))):
        sound = _identity(clip)
        report.remarks["of several channels, which are mixed"] += bool(sounds.pop("channels", ""))
        report.remarks["in the manifests of training, too"] += sound in trained
        found = _line_defects(clip, check) | sounds
        if sound in texts:
            found["repeated"] = "in an earlier line, too" + (", with another text" if texts[sound] != clip.text else "")
        report.defects.extend((kind, clip.title, words) for kind, words in found.items())
        if not found:
            report.clean.append(clip)
            texts[sound] = clip.text
    return report


def check_clean(clips: Sequence[Clip], manifest: Path, num_threads: int, process: Process) -> None:
    """Decode the clips of a manifest and check that evaluation would accept them.

    Every process has to call it, with the same clips, and decodes its share of them.

    Raises:
        RuntimeError: In the leading process, if evaluation would refuse some clips; the message names the first
            with the reasons.
    """
    share = range(process.rank, len(clips), process.size)
    heard = _listen([clips[i] for i in share], manifest, 0, num_threads, is_shown=process.leads)
    bad = process.union(
        {
            i: found[kind]
            for i, (clip, found) in zip(share, heard, strict=True)
            for kind in ("unreadable", "sound")
            if kind in found
        }
    )
    if bad and process.leads:
        raise RuntimeError(refusal([(clips[i], bad[i]) for i in sorted(bad)], len(clips), manifest))


def _identity(clip: Clip) -> int:
    """Return a hash of the sound that a clip names, whatever its text."""
    stretch = None if clip.offset is None else (clip.offset, clip.duration)
    return hash((os.path.normpath(clip.audio_filepath.absolute()), stretch))


def _line_defects(clip: Clip, check: ManifestCheck) -> dict[str, str]:
    """Return the defects that the manifest's line shows without its sound, by kind."""
    config = check.config
    found: dict[str, object] = {"text": text_defect(clip, config)}
    if check.for_training:
        found["duration"] = duration_defect(clip, config)
        found["alignment"] = alignment_defect(clip, planned_frames(clip, config), config)
    return {kind: str(words) for kind, words in found.items() if words}


def _listen(
    clips: Sequence[Clip], manifest: Path, min_rate_hz: int, num_threads: int, *, is_shown: bool = True
) -> Iterator[tuple[Clip, dict[str, str]]]:
    """Decode the clips of a manifest and yield each, in order, with the defects of its sound by kind."""
    failed: dict[Clip, str] = {}
    batches = group([Item(clip) for clip in clips], SECONDS_AT_ONCE)
    largest = max(map(len, batches), default=1)

    def build(remaining: Iterator[Sequence[Item]]) -> Pipeline:
        def read() -> tuple[list[Encoded], list[npt.NDArray[np.int32]]]:
            sounds = read_batch(next(remaining), failed, num_threads)
            headers = (soundfile.info(io.BytesIO(sound.tobytes())) for sound in sounds)
            return sounds, [np.array([header.samplerate, header.channels], np.int32) for header in headers]

        @pipeline_def(batch_size=largest, num_threads=num_threads, device_id=None, enable_conditionals=True)
        def graph() -> tuple[DataNode, ...]:
            data, header = fn.external_source(source=read, num_outputs=2, dtype=[types.UINT8, types.INT32], ndim=1)
            signal, samples = decode(data, float(SAMPLE_RATE_HZ))
            return samples, fn.reductions.rms(signal), level(signal), header

        pipeline: Pipeline = graph()
        pipeline.build()
        return pipeline

    with clip_progress(len(clips), manifest.name, is_shown=is_shown) as progress:
        for items, outputs in run_surviving(batches, failed, build):
            samples, rms, levels, headers = (np.array(output.as_tensor()) for output in outputs)
            for row, item in enumerate(items):
                if item.clip in failed:
                    yield item.clip, {"unreadable": failed[item.clip]}
                    continue
                rate_hz, channels = map(int, headers[row])
                found = {
                    "sound": sound_defect(item.clip, int(samples[row]), math.isfinite(rms[row])),
                    "silent": silence_defect(float(levels[row])) if samples[row] else None,
                    "rate": f"recorded at {rate_hz} Hz, below {min_rate_hz} Hz" if rate_hz < min_rate_hz else None,
                    "channels": f"{channels} channels" if channels > 1 else None,
                }
                yield item.clip, {kind: words for kind, words in found.items() if words}
            progress(len(items))
