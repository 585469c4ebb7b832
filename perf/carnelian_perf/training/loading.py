"""Compare reading with training, in CPU seconds on one thread each, to see whether the loader is a bottleneck."""

import dataclasses
import time
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from carnelian_training.config import Config
from carnelian_training.data.loading import Batch, load
from carnelian_training.data.plan import plan_epoch
from carnelian_training.distributed import Process
from carnelian_training.loop.recognition import read_training_clips
from carnelian_training.loop.state import new_state

from carnelian_perf.machine import torch_threads
from carnelian_perf.raw_file import Record, describe_origin
from carnelian_perf.training.step import timed_step


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The CPU time that some batches cost."""

    audio_s: float
    """Seconds of audio in the batches, without padding."""
    cpu_s: float
    """CPU seconds of all threads of this process; other processes on the machine do not count."""
    audio_s_per_cpu_s: float
    """Seconds of audio per second of one core."""


@dataclass(frozen=True, kw_only=True)
class Loading(Cost):
    """The CPU time of reading batches."""

    batches: int


@dataclass(frozen=True, kw_only=True)
class Training(Cost):
    """The CPU time of training steps, as `carnelian-train fit` takes them."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """The raw file of `carnelian-perf loading`."""

    subject: Literal["loading"] = "loading"
    augment: dict[str, str]
    """The configuration's augmentation, which is a part of reading."""
    batch_s: float
    """Largest number of seconds of audio in a batch."""
    precision: str
    """The configuration's `loop.precision`, in which steps are taken."""
    loading: Loading
    training: Training


def measure(config: Config, batches: int, steps: int) -> Measurement:
    """Read `batches` batches of a configuration's first epoch, and train on the first `steps` of them.

    Raises:
        ValueError: The epoch has no more batches than asked for, or no clip of a batch to train on can be read.
    """
    origin = describe_origin()
    plan = plan_epoch(read_training_clips(config), config, 0)
    if batches >= len(plan):
        raise ValueError(
            f"the epoch must have more batches than are read, {batches}, but has {len(plan)}: give fewer, lower "
            "`data.batch_s`, or name more clips in `data.train`"
        )
    reader = load(plan, config.features, 1, training=config)
    first = next(reader)  # the pipeline is now built and reads ahead, as it does at the end
    with torch_threads(1):
        started = time.process_time()
        read = list(islice(reader, batches))
        loading = Loading(batches=batches, **_cost(read, time.process_time() - started))
        state = new_state(config, Process(torch.device("cpu")))
        timed_step(state, first.items, first, config)  # warms up
        trained = read[:steps]
        cpu_s = sum(timed_step(state, batch.items, batch, config)[1] for batch in trained)
        training = Training(steps=len(trained), **_cost(trained, cpu_s))
    return Measurement(
        model=config.name,
        **origin,
        augment={name: str(value) for name, value in dataclasses.asdict(config.augment).items()},
        batch_s=config.data.batch_s,
        precision=config.loop.precision,
        loading=loading,
        training=training,
    )


def _cost(batches: list[Batch], cpu_s: float) -> dict[str, float]:
    """Return the fields of :class:`Cost`."""
    audio_s = sum(item.duration_s for batch in batches for item in batch.items)
    return {"audio_s": audio_s, "cpu_s": cpu_s, "audio_s_per_cpu_s": audio_s / cpu_s}
