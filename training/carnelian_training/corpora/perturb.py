"""Speed perturbation on disk (Ko et al. 2015), for tools that cannot do it while reading, as training here does."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import soxr

from carnelian_training.data.audio import read_samples
from carnelian_training.data.defects import sound_defect
from carnelian_training.data.manifest import Clip, read_manifest, write_manifest
from carnelian_training.data.sound_file import write_sound
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.progress import clip_progress
from carnelian_training.replacement import check_apart, remove_partials

TASKS_AT_ONCE = 1000
"""The number of clips that wait for a thread; each takes 2.3 kB of memory."""


def perturb(manifest: Path, directory: Path, speeds: Sequence[float]) -> Path:
    """Write a copy of each clip at each speed as FLAC, and a manifest of the old and the new clips.

    Args:
        manifest: manifest of the clips; their files are referred to, not copied.
        directory: folder for `manifest.jsonl` and `<speed>/<number>-<name>.flac`.
        speeds: factors of speed and pitch; 1.1 is ten per cent faster and higher.

    Returns:
        The path of the new manifest.

    Raises:
        ValueError: A speed is outside 0.5 to 2, is 1 or occurs twice; a clip cannot be read or does not match its
            manifest; or the new manifest would overwrite the old one, or lose speeds of an earlier run or clips that
            none has written.
    """
    if wrong := [speed for speed in speeds if not 0.5 <= speed <= 2.0 or speed == 1.0]:
        raise ValueError(f"speeds must be within 0.5 to 2.0 and not 1, but are {wrong}")
    names = [f"{speed:g}" for speed in speeds]
    if len(set(names)) < len(names):
        raise ValueError(f"speeds must differ, but are {', '.join(names)}")
    target = directory / "manifest.jsonl"
    check_apart(target, manifest)
    clips = read_manifest(manifest)
    if target.exists():
        _check_keeps(target, speeds)
    for name in names:
        remove_partials(directory / name, "*.flac")
    tasks = (
        (clip, _place(directory, speed, number, clip), speed) for speed in speeds for number, clip in enumerate(clips)
    )
    new = []
    total = len(speeds) * len(clips)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, clip_progress(total) as progress:
        while chunk := list(islice(tasks, TASKS_AT_ONCE)):
            for clip in pool.map(_write, *zip(*chunk, strict=True)):
                new.append(clip)
                progress(1)
    write_manifest(target, [*clips, *new])
    return target


def _place(directory: Path, speed: float, number: int, clip: Clip) -> Path:
    """Return where a manifest's clip of this number goes at a speed."""
    return directory / f"{speed:g}" / f"{number:07d}-{clip.audio_filepath.stem}.flac"


def _check_keeps(manifest: Path, speeds: Sequence[float]) -> None:
    """Check that a manifest is of an earlier run, whose speeds are among these.

    Raises:
        ValueError: It has another speed, or a clip that no earlier run has written.
    """
    made: dict[Path, float] = {}
    given = []
    for clip in read_manifest(manifest):
        speed = clip.extra.get("speed")  # a synthesised clip has a speed of its own
        if isinstance(speed, int | float) and clip.audio_filepath.parent == manifest.parent / f"{speed:g}":
            made[clip.audio_filepath] = speed
        else:
            given.append(clip)
    if lost := sorted({*made.values()} - {*speeds}):
        raise ValueError(
            f"{manifest} would lose its clips of the speeds {', '.join(map(str, lost))}: ask for these too, or choose "
            "another folder"
        )
    others = [
        clip
        for number, clip in enumerate(given)
        if not any(_place(manifest.parent, speed, number, clip) in made for speed in speeds)
    ]
    if others:
        raise ValueError(
            f"{manifest} would lose {len(others)} clips that `perturb` has not written, such as {others[0].title}: "
            "choose another folder"
        )


def _write(clip: Clip, target: Path, speed: float) -> Clip:
    samples, rate_hz = read_samples(clip)
    sound = samples.mean(1)
    num_samples = round(len(sound) / rate_hz * SAMPLE_RATE_HZ)
    if defect := sound_defect(clip, num_samples, bool(np.isfinite(sound).all())):
        raise ValueError(
            f"{clip.title}: {defect}; `carnelian-train validate --write` makes a manifest without such clips"
        )
    faster = np.asarray(soxr.resample(sound, rate_hz * speed, rate_hz), np.float32)
    write_sound(target, faster, rate_hz)
    extra = {**clip.extra, "speed": speed}
    return replace(clip, audio_filepath=target, duration=len(faster) / rate_hz, extra=extra, offset=None)
