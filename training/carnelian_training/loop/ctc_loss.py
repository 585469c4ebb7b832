"""The objective of recognisers: the CTC loss of a batch, after augmentation of its features."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.config import Config
from carnelian_training.data.augment import spec_augment, warp_frequency
from carnelian_training.data.loading import Batch
from carnelian_training.data.plan import Item
from carnelian_training.data.span_masks import channel_mask, time_mask
from carnelian_training.models.wav2vec2 import Wav2Vec2Config
from carnelian_training.precision import autocast


class CtcObjective:
    """The loss of one step: a sum over clips, which the loop divides by the characters of all parts and processes."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def planned(self, items: Sequence[Item]) -> float:
        """Characters of the step's transcripts, by the manifest."""
        return sum(len(item.clip.text) for item in items)

    def batches(self, batches: Iterable[Batch], parts: int) -> Iterable[Batch]:
        """The parts of this process, in the order in which :meth:`losses` will see them."""
        return batches

    def losses(self, network: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The CTC loss of each clip, [batch] float32, and the characters of all."""
        return ctc_loss(network, batch, self.config), sum(len(item.clip.text) for item in batch.items)

    def measured(self) -> Mapping[str, float]:
        """Nothing but the loss."""
        return {}


def ctc_loss(network: nn.Module, batch: Batch, config: Config) -> Tensor:
    """The CTC loss of each clip of a batch, augmented first: [batch] float32."""
    device = next(network.parameters()).device
    inputs = augmented(batch, config, device)
    targets, target_lengths = batch.targets(config.labels)
    with autocast(device, config.loop.precision):
        log_probs, lengths = network(**inputs)
    return F.ctc_loss(
        log_probs.transpose(0, 1),
        targets.to(device),
        lengths,
        target_lengths.to(device),
        blank=len(config.labels),
        reduction="none",
    )


def augmented(batch: Batch, config: Config, device: torch.device) -> dict[str, Tensor]:
    """The network's inputs: augmented features, lengths and, for wav2vec 2.0, the masks of frames and channels."""
    inputs = {"features": batch.features.to(device), "lengths": batch.lengths.to(device)}
    if not isinstance(config.model, Wav2Vec2Config):
        features = warp_frequency(inputs["features"], config.augment, batch.seeds)
        return inputs | {"features": spec_augment(features, inputs["lengths"], config.augment, batch.seeds)}
    frames = [config.model.output_frames(samples) for samples in batch.lengths.tolist()]
    masks = {
        "time_mask": time_mask(frames, max(1, *frames), config.augment.spans, batch.seeds),
        "channel_mask": channel_mask(config.model.width, config.augment.spans, batch.seeds),
    }
    return inputs | {name: mask.to(device) for name, mask in masks.items() if mask is not None}
