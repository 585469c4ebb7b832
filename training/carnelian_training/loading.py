"""Batches of clips for training and evaluation: a deterministic plan, then DALI for decoding and features.

In: clips of a manifest. Out: :class:`Batch`, padded to the longest clip, with honest lengths. The plan of an epoch
depends on the seed and the epoch alone, so a run can stop after any batch and go on exactly there.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.pipeline import DataNode, Pipeline
from torch import Tensor

from carnelian_training.acoustics import UNDISTURBED, Disturbance, Sounds, disturb, read_noise, read_room
from carnelian_training.config import Config
from carnelian_training.features import HOP_SAMPLES, NUM_MELS, SAMPLE_RATE_HZ, log_mel
from carnelian_training.manifest import Clip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """One clip as it will be heard: `speed` 1.1 is ten per cent faster and higher."""

    clip: Clip
    speed: float = 1.0
    seed: int = 0
    """What else is random about this clip in this epoch is drawn from here, whatever its batch and its process."""
    disturbance: Disturbance = UNDISTURBED

    @property
    def duration_s(self) -> float:
        """Seconds after the change of speed."""
        return self.clip.duration / self.speed


@dataclass(frozen=True)
class Batch:
    """Clips of about equal length.

    Without items (a process whose share of a small batch is empty) there is one row of one frame and length 0: the
    network can run, so that every process takes part in what they compute together, and the loss, a sum, is 0.
    """

    items: Sequence[Item]
    features: Tensor
    """[batch, mels, frames] float32, zero-padded."""
    lengths: Tensor
    """[batch] int64, frames."""

    @property
    def seeds(self) -> list[int]:
        """One per row of `features`."""
        return [item.seed for item in self.items] or [0]

    def targets(self, labels: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Label ids of all transcripts in one [sum of lengths] int64 tensor, and the [batch] lengths."""
        index = {label: i for i, label in enumerate(labels)}
        ids = [[index[character] for character in item.clip.text] for item in self.items] or [[]]
        return torch.tensor([i for row in ids for i in row], dtype=torch.int64), torch.tensor([len(row) for row in ids])


def trainable(clips: Sequence[Clip], config: Config) -> list[Clip]:
    """The clips that can be learnt from; what is left out is counted in the log, by reason.

    Left out: clips outside the configured durations, characters outside the labels, and transcripts that CTC cannot
    align even at the fastest speed (one frame per character, one more between equal neighbours).
    """
    left_out: dict[str, int] = {}
    kept = []
    fastest = max(1.0, config.augment.speed[1])
    frames_per_s = SAMPLE_RATE_HZ / HOP_SAMPLES / config.model.stride
    for clip in clips:
        needed = len(clip.text) + sum(a == b for a, b in zip(clip.text, clip.text[1:], strict=False))
        unknown = set(clip.text) - set(config.labels)
        if not config.data.min_duration_s <= clip.duration <= config.data.max_duration_s:
            reason = "duration"
        elif unknown:
            reason = f"characters outside the labels: {''.join(sorted(unknown))!r}"
        elif not clip.text or needed > clip.duration / fastest * frames_per_s:
            reason = "empty or too long a transcript for its duration"
        else:
            kept.append(clip)
            continue
        left_out[reason] = left_out.get(reason, 0) + 1
    for reason, count in left_out.items():
        logger.warning("left out %d of %d clips: %s", count, len(clips), reason)
    return kept


def plan_epoch(
    clips: Sequence[Clip], config: Config, epoch: int, *, rank: int = 0, world_size: int = 1
) -> list[list[Item]]:
    """Draw what augments each clip, group clips of about equal length under the budget of seconds, shuffle the groups.

    The groups, one per step of the optimiser, depend on the seed and the epoch alone. Each is dealt out to
    `world_size` shares, of which this is number `rank`: processes, or processes times the parts of an accumulated
    batch. All shares of an epoch have equally many batches and hold every clip once; where a group has fewer clips
    than there are shares, some are empty.

    Raises:
        ConfigError: A folder of noises or rooms holds no sound file.
    """
    draw = random.Random(f"{config.loop.seed}/{epoch}")
    low, high = config.augment.speed
    sounds = Sounds.find(config.augment)
    items = [
        Item(
            clip,
            draw.uniform(low, high) if draw.random() < config.augment.speed_probability else 1.0,
            draw.getrandbits(63),
        )
        for clip in clips
    ]
    items = [replace(item, disturbance=sounds.draw(config.augment, draw)) for item in items]
    # Lengths are blurred by 10 per cent, so that groups differ from epoch to epoch.
    blurred = [(item.duration_s * draw.uniform(0.95, 1.05), i) for i, item in enumerate(items)]
    batches = group([items[i] for _, i in sorted(blurred)], config.data.batch_s)
    draw.shuffle(batches)
    # Every n-th of a sorted group: the shares take about equally long.
    return [batch[rank::world_size] for batch in batches]


def group(items: Sequence[Item], batch_s: float) -> list[list[Item]]:
    """Cut a sequence into batches of at most `batch_s` seconds, padding included; a longer clip comes alone."""
    batches: list[list[Item]] = []
    longest = 0.0
    for item in items:
        longest = max(longest, item.duration_s)
        if not batches or longest * (len(batches[-1]) + 1) > batch_s:
            batches.append([])
            longest = item.duration_s
        batches[-1].append(item)
    return batches


def load(batches: Sequence[Sequence[Item]], num_threads: int) -> Iterator[Batch]:
    """Decode audio and compute features, one batch ahead of the caller.

    Raises:
        RuntimeError: A clip cannot be decoded; the message names the clips of its batch and carries DALI's words.
    """
    largest = max(map(len, batches), default=0)
    filled = [items for items in batches if items]
    encoded_batches, disturbed_batches = iter(filled), iter(filled)

    def read() -> tuple[list[npt.NDArray[np.uint8]], list[npt.NDArray[np.float32]]]:
        items = next(encoded_batches)
        encoded = [np.fromfile(item.clip.audio_filepath, np.uint8) for item in items]
        return encoded, [np.array(SAMPLE_RATE_HZ / item.speed, np.float32) for item in items]

    def read_disturbances() -> tuple[list[npt.NDArray[np.float32]], ...]:
        disturbances = [(item.disturbance, item.duration_s) for item in next(disturbed_batches)]
        return (
            [read_room(disturbance.room) for disturbance, _ in disturbances],
            [read_noise(disturbance, duration_s) for disturbance, duration_s in disturbances],
            [np.array(disturbance.snr_db, np.float32) for disturbance, _ in disturbances],
            [np.array(disturbance.gain_db, np.float32) for disturbance, _ in disturbances],
        )

    @pipeline_def
    def graph() -> tuple[DataNode, DataNode]:
        encoded, rate = fn.external_source(source=read, num_outputs=2, dtype=[types.UINT8, types.FLOAT], ndim=[1, 0])
        # Resampled to 16000 / speed and then taken for 16000: that is the change of speed.
        signal, _ = fn.decoders.audio(encoded, sample_rate=rate, dtype=types.FLOAT, downmix=True)
        if any(item.disturbance != UNDISTURBED for items in batches for item in items):
            disturbances = fn.external_source(
                source=read_disturbances, num_outputs=4, dtype=types.FLOAT, ndim=[1, 1, 0, 0]
            )
            signal = fn.python_function(signal, *disturbances, function=disturb)
        features = log_mel(signal if device_id is None else signal.gpu())
        frames = features.shape(dtype=types.INT64)[1]
        return fn.pad(features, axes=[1]), frames

    device_id = torch.cuda.current_device() if torch.cuda.is_available() else None
    pipeline: Pipeline = graph(batch_size=max(largest, 1), num_threads=num_threads, device_id=device_id)
    pipeline.build()
    for items in batches:
        if not items:
            yield Batch((), torch.zeros(1, NUM_MELS, 1), torch.zeros(1, dtype=torch.int64))
            continue
        try:
            features, frames = (output.as_cpu() for output in pipeline.run())
        except RuntimeError as error:
            paths = ", ".join(str(item.clip.audio_filepath) for item in items)
            raise RuntimeError(f"one of these clips cannot be decoded: {paths}\n{error}") from error
        lengths = torch.from_numpy(np.array(frames.as_tensor())).flatten()
        yield Batch(items, torch.from_numpy(np.array(features.as_tensor())), lengths)
