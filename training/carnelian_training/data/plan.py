"""The plan of an epoch: which clips it has, how each is augmented, and which clips form a step.

Input: clips of a manifest. Output: lists of :class:`Item`, one per step. They depend only on the configuration, the
clips, the sounds and the epoch, so a run can stop after any step and be resumed exactly there.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carnelian_training.config import AugmentConfig, Config
from carnelian_training.ctc.spelling import quote
from carnelian_training.data.acoustics import UNDISTURBED, Disturbance, Sounds
from carnelian_training.data.defects import alignment_defect, duration_defect, planned_frames, text_defect
from carnelian_training.data.manifest import Clip
from carnelian_training.distributed import is_first

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """One clip with its augmentation in one epoch."""

    clip: Clip
    speed: float = 1.0
    """The factor of speed and pitch: 1.1 is ten per cent faster and higher."""
    seed: int = 0
    """The seed of all other random numbers of this clip in this epoch, whatever its batch and its process."""
    disturbance: Disturbance = UNDISTURBED
    line: Clip | None = None
    """The clip of the manifest that `clip` was cut out of; None if `clip` is that clip."""

    @property
    def duration_s(self) -> float:
        """The duration in seconds after the change of speed."""
        return self.clip.duration / self.speed

    @property
    def title(self) -> str:
        """The name of the clip in the log."""
        return (self.line or self.clip).title


def trainable(clips: Sequence[Clip], config: Config, manifest: Path) -> list[Clip]:
    """Return the clips that can be used in training, judged by their manifest; log how many are left out, by reason.

    Left out are clips with a duration outside the limits or too short for an output frame, with characters that are not
    labels, and with transcripts that CTC cannot align at the fastest speed. Sound files are not read here; `load`
    checks them.
    """
    left_out: Counter[str] = Counter()
    first: dict[str, str] = {}  # the first clip left out, by reason
    unknown: dict[str, set[str]] = {}  # characters outside the labels, by reason
    kept = []
    for clip in clips:
        if not (defect := duration_defect(clip, config)) and (defect := text_defect(clip, config)):
            unknown.setdefault(defect.reason, set()).update(set(clip.text) - set(config.labels))
        if defect := defect or alignment_defect(clip, planned_frames(clip, config), config):
            left_out[defect.reason] += 1
            first.setdefault(defect.reason, ": ".join(filter(None, [clip.title, defect.found])))
        else:
            kept.append(clip)
    if is_first():
        for reason, count in left_out.items():
            said = f": {quote(''.join(sorted(characters)))}" if (characters := unknown.get(reason)) else ""
            said = said or f", such as {first[reason]}"
            logger.warning("left out %d of %d clips of %s: %s%s", count, len(clips), manifest, reason, said)
    return kept


def plan_epoch(clips: Sequence[Clip], config: Config, epoch: int) -> list[list[Item]]:
    """Draw each clip's augmentation, group clips of about equal length up to `data.batch_s`, and shuffle the groups.

    There is one group per step of the optimiser. The plan depends only on the clips, the
    configuration, the noises and rooms that there are, and the epoch.

    Raises:
        ConfigError: A folder of noises or rooms holds no sound file.
    """
    rng = random.Random(f"{config.loop.seed}/{epoch}")
    sounds = Sounds.find(config.augment)
    items = [Item(clip, _draw_speed(config.augment, rng), rng.getrandbits(63)) for clip in clips]
    items = [replace(item, disturbance=sounds.draw(config.augment, rng)) for item in items]
    if config.pretraining is not None:
        items = [crop(item, config.pretraining.crop_s, rng) for item in items]
    # Lengths vary randomly by 5 per cent for sorting, so that groups differ from epoch to epoch.
    blurred = [(item.duration_s * rng.uniform(0.95, 1.05), i) for i, item in enumerate(items)]
    batches = group([items[i] for _, i in sorted(blurred)], config.data.batch_s)
    rng.shuffle(batches)
    return batches


def crop(item: Item, longest_s: float, rng: random.Random) -> Item:
    """Cut a random stretch of `longest_s` out of an item that is longer after the change of speed; else return it."""
    cut_s = longest_s * item.speed
    if item.clip.duration <= cut_s:
        return item
    offset = (item.clip.offset or 0.0) + rng.uniform(0.0, item.clip.duration - cut_s)
    return replace(item, clip=replace(item.clip, duration=cut_s, offset=offset), line=item.clip)


def _draw_speed(config: AugmentConfig, rng: random.Random) -> float:
    if rng.random() >= config.speed_probability:
        return 1.0
    return rng.choice(config.speed_factors) if config.speed_factors else rng.uniform(*config.speed)


def group(items: Sequence[Item], batch_s: float) -> list[list[Item]]:
    """Cut a sequence into batches of at most `batch_s` seconds, padding included; a longer clip is its own batch."""
    batches: list[list[Item]] = []
    longest = 0.0
    for item in items:
        longest = max(longest, item.duration_s)
        if not batches or longest * (len(batches[-1]) + 1) > batch_s:
            batches.append([])
            longest = item.duration_s
        batches[-1].append(item)
    return batches


def deal(
    batch: Sequence[Item], device_batch_s: float | None, *, rank: int = 0, world_size: int = 1
) -> list[list[Item]]:
    """Return the clips of a step that process `rank` takes, in as few parts of at most `device_batch_s` as possible.

    All processes get the same number of parts, and together they get every clip once. With fewer clips than processes,
    some parts are empty. A clip longer than `device_batch_s` is a part of its own.
    """
    longest = max(item.duration_s for item in batch)
    most = len(batch) if device_batch_s is None else max(1, int(device_batch_s / longest))  # most clips in a part
    parts = max(1, math.ceil(len(batch) / (world_size * most)))
    # Each part takes every n-th clip of the batch, which is sorted by length, so all parts take about the same time.
    return [list(batch[part * world_size + rank :: parts * world_size]) for part in range(parts)]
