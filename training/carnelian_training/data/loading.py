"""Batches of clips for training and evaluation: DALI decodes the planned clips and computes their features.

Input: lists of :class:`Item`. Output: a :class:`Batch` for each list, padded to its longest clip, with true lengths.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.backend import GetCufftVersion  # type: ignore[attr-defined]  # missing in its stubs
from nvidia.dali.pipeline import DataNode, Pipeline
from torch import Tensor

from carnelian_training.config import Config
from carnelian_training.data.acoustics import UNDISTURBED, disturb, read_sounds
from carnelian_training.data.audio import Encoded
from carnelian_training.data.decoding import decode, level, pool, read_batch, run_surviving
from carnelian_training.data.defects import (
    alignment_defect,
    check_files,
    duration_tolerance_s,
    refusal,
    silence_defect,
    sound_defect,
)
from carnelian_training.data.manifest import Clip
from carnelian_training.data.plan import Item
from carnelian_training.features import SAMPLE_RATE_HZ, FeatureSettings
from carnelian_training.front_end import FrontEnd, build_features, channels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """A batch of clips of about equal length.

    If a process's share of a small batch is empty or all bad, there are no items, but one row of one frame with length
    0. So the network can run, every process takes part in collective operations, and the loss, a sum, is 0.
    """

    items: Sequence[Item]
    features: Tensor
    """[batch, channels, frames] float32, zero-padded: log-mel features, or samples."""
    lengths: Tensor
    """[batch] int64, the frames of each clip."""
    skipped: Sequence[tuple[Item, str]] = ()
    """The planned clips that were left out, each with the reason."""

    @property
    def seeds(self) -> list[int]:
        """The seed of each row of `features`."""
        return [item.seed for item in self.items] or [0]

    def targets(self, labels: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the label ids of all transcripts in one [sum of lengths] int64 tensor, and the [batch] lengths.

        Transcripts must be of the labels alone; :func:`~carnelian_training.data.plan.trainable` leaves others out.
        """
        index = {label: i for i, label in enumerate(labels)}
        ids = [[index[character] for character in item.clip.text] for item in self.items] or [[]]
        return torch.tensor([i for row in ids for i in row], dtype=torch.int64), torch.tensor([len(row) for row in ids])


def _no_clips(num_channels: int, skipped: Sequence[tuple[Item, str]] = ()) -> Batch:
    return Batch((), torch.zeros(1, num_channels, 1), torch.zeros(1, dtype=torch.int64), tuple(skipped))


def load(
    batches: Sequence[Sequence[Item]],
    settings: FrontEnd,
    num_threads: int,
    *,
    training: Config | None = None,
    strict: bool = True,
    manifest: Path | None = None,
    named: set[tuple[str, str]] | None = None,
    prefetch: int = 2,
) -> Iterator[Batch]:
    """Decode clips and compute their features ahead of the caller; yield a :class:`Batch` for each list of items.

    Args:
        batches: lists of items, from `plan_epoch` or `group`.
        settings: settings of the features.
        num_threads: number of threads for decoding and features.
        training: the configuration of the training run: a clip that breaks its limits is left out of its batch, logged
            and listed in `Batch.skipped`. None, for evaluation: there are no limits, and a bad clip is an error.
        strict: without `training`, False leaves out bad clips as training does.
        manifest: the clips' manifest, for the message of an error.
        named: clips and defects that the log has already named, which it does not name again; new ones are added.
        prefetch: number of batches that DALI works on before they are needed.

    Raises:
        RuntimeError: Without `training`, and if `strict`, clips cannot be decoded or do not match their manifest. No
            batch is yielded after the first such clip; the error comes at the end and names the first with the reasons.
            Files that are missing are named before the first batch.
    """
    failed: dict[Clip, str] = {}
    broken: set[Path] = set()
    named = set() if named is None else named
    refused: list[tuple[Clip, str]] = []
    is_strict = training is None and strict
    if is_strict:
        check_files([item.clip for items in batches for item in items], num_threads, manifest)
    largest = max(map(len, batches), default=0) or 1
    is_disturbed = any(item.disturbance != UNDISTURBED for items in batches for item in items)

    def build_pipeline(remaining: Iterator[Sequence[Item]]) -> Pipeline:
        return _pipeline(remaining, largest, is_disturbed, failed, broken, settings, num_threads, prefetch)

    for items, outputs in run_surviving(batches, failed, build_pipeline):
        batch = _no_clips(channels(settings))
        if items:
            batch = _batch(items, [output.as_cpu() for output in outputs], failed, training)
        if is_strict:
            refused += [(item.clip, defect) for item, defect in batch.skipped]
        else:
            _warn_once(batch.skipped, named)
        if not refused:
            yield batch
    if refused:
        raise RuntimeError(refusal(refused, sum(map(len, batches)), manifest))


def _pipeline(
    batches: Iterator[Sequence[Item]],
    largest: int,
    is_disturbed: bool,
    failed: dict[Clip, str],
    broken: set[Path],
    settings: FrontEnd,
    num_threads: int,
    prefetch: int,
) -> Pipeline:
    """Build the pipeline that reads, disturbs (if `is_disturbed`) and featurises batches of at most `largest` items.

    Its outputs are: padded features and their frames; of the decoded signal, the number of samples, the root mean
    square and the level; and the root mean square after disturbance.
    """
    encoded: deque[Sequence[Item]] = deque()

    def read() -> tuple[list[Encoded], list[npt.NDArray[np.float32]], list[npt.NDArray[np.int32]]]:
        items = next(batches)
        if is_disturbed:
            encoded.append(items)
        longest_s = [(item.clip.duration + duration_tolerance_s(item.clip)) / item.speed for item in items]
        return (
            read_batch(items, failed, num_threads),
            [np.array(SAMPLE_RATE_HZ / item.speed, np.float32) for item in items],
            [np.array([min(seconds * SAMPLE_RATE_HZ, 2**31 - 1)], np.int32) for seconds in longest_s],
        )

    def disturb_all(signals: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        items = encoded.popleft()
        sounds = pool(num_threads).map(lambda item: read_sounds(item.disturbance, item.duration_s, broken), items)
        disturbances = [item.disturbance for item in items]
        return list(pool(num_threads).map(disturb, signals, *zip(*sounds, strict=True), disturbances))

    @pipeline_def(enable_conditionals=True)
    def graph() -> tuple[DataNode, ...]:
        data, rate_hz, longest = fn.external_source(
            source=read, num_outputs=3, dtype=[types.UINT8, types.FLOAT, types.INT32], ndim=[1, 0, 1]
        )
        # Resampling to 16000 / speed Hz and treating the result as 16000 Hz changes the speed.
        decoded, samples = decode(data, rate_hz)
        # A clip that lasts longer than its manifest says is refused later; until then its features must not fill the
        # memory.
        signal = decoded = fn.slice(decoded, start=0, shape=longest, axes=[0], out_of_bounds_policy="trim_to_shape")
        if is_disturbed:
            signal = fn.python_function(decoded, function=disturb_all, batch_processing=True)
        features = build_features(signal if device_id is None else signal.gpu(), settings)
        frames = features.shape(dtype=types.INT64)[1]
        rms = fn.reductions.rms(decoded), level(decoded), fn.reductions.rms(signal)
        return fn.pad(features, axes=[1]), frames, samples, *rms

    device_id = _gpu_of_features(settings)
    pipeline: Pipeline = graph(
        batch_size=largest,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
    )
    pipeline.build()
    return pipeline


def _gpu_of_features(settings: FrontEnd) -> int | None:
    """Return the index of the GPU that computes features; None for the CPU."""
    if not torch.cuda.is_available():
        return None
    if isinstance(settings, FeatureSettings) and GetCufftVersion() < 0:
        _warn_of_cufft()
        return None
    return torch.cuda.current_device()


@functools.cache
def _warn_of_cufft() -> None:
    logger.warning(
        "features are computed on the CPU, for DALI finds no cuFFT of CUDA 12, which PyTorch for CUDA 13 does not "
        "bring: `pip install nvidia-cufft-cu12`"
    )


def _warn_once(skipped: Sequence[tuple[Item, str]], named: set[tuple[str, str]]) -> None:
    """Log the clips that were left out, once for each clip and reason."""
    for item, defect in skipped:
        if (item.title, defect) not in named:
            logger.warning("skipped %s: %s", item.title, defect)
            named.add((item.title, defect))


def _batch(items: Sequence[Item], outputs: list[Any], failed: dict[Clip, str], training: Config | None) -> Batch:
    """Make a batch of the clips without a defect; see :func:`load` for `training`.

    Silence, and a transcript that CTC cannot align, are defects only in training.
    """
    tensors = (torch.from_numpy(np.array(out.as_tensor())) for out in outputs)
    features, frames, samples, decoded_rms, decoded_level, rms = tensors
    kept: list[int] = []
    skipped: list[tuple[Item, str]] = []
    for row, item in enumerate(items):
        num_samples, is_finite = round(samples[row].item() * item.speed), math.isfinite(decoded_rms[row].item())
        defect = failed.get(item.clip) or sound_defect(item.clip, num_samples, is_finite)
        if not defect and not math.isfinite(rms[row].item()):
            defect = f"not finite any more after augmentation with {item.disturbance}"
        if not defect and training is not None:
            unaligned = alignment_defect(item.clip, int(frames[row]), training)
            defect = silence_defect(decoded_level[row].item()) or (str(unaligned) if unaligned else None)
        if defect:
            skipped.append((item, defect))
        else:
            kept.append(row)
    if not skipped:
        return Batch(items, features, frames)
    if not kept:
        return _no_clips(features.shape[1], skipped)
    longest = int(frames[kept].max())
    return Batch([items[row] for row in kept], features[kept, :, :longest], frames[kept], tuple(skipped))
