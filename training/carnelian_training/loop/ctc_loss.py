"""The objective of recognisers: the CTC or CR-CTC loss of a batch after augmentation of its features."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.config import Config
from carnelian_training.data.augment import spec_augment, warp_frequency
from carnelian_training.data.loading import Batch
from carnelian_training.data.plan import Item
from carnelian_training.data.span_masks import channel_mask, time_mask
from carnelian_training.features import FeatureSettings
from carnelian_training.loop.task import Objective
from carnelian_training.models.masked import frames_within
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config
from carnelian_training.precision import autocast


class CtcObjective(Objective):
    """The CTC loss of one step: a sum over clips; the loop divides it by the characters of all parts and processes."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def planned(self, items: Sequence[Item]) -> float:
        """Return the number of characters in the step's transcripts, as the manifest has them."""
        return sum(len(item.clip.text) for item in items)

    def losses(self, network: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the :func:`ctc_loss` of each clip, [batch] float32, and the number of characters of all clips."""
        return ctc_loss(network, batch, self.config), sum(len(item.clip.text) for item in batch.items)


def ctc_loss(network: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Compute the CTC loss of each clip of a batch after augmentation: [batch] float32, summed over frames.

    With `augment.consistency` it is the mean over two augmented views of a clip, plus that weight times
    :func:`disagreement`.
    """
    device = next(network.parameters()).device
    consistency = config.augment.consistency
    views = [augmented(batch, config, device, view) for view in range(2 if consistency else 1)]
    inputs = {name: torch.cat([view[name] for view in views]) for name in views[0]}
    targets, target_lengths = batch.targets(config.labels)
    with autocast(device, config.loop.precision):
        log_probs, lengths = network(**inputs)
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        targets.repeat(len(views)).to(device),
        lengths,
        target_lengths.repeat(len(views)).to(device),
        blank=len(config.labels),
        reduction="none",
    )
    loss = losses.view(len(views), -1).mean(0)
    if not consistency:
        return loss
    one, other = log_probs.chunk(2)
    return loss + consistency * disagreement(one, other, lengths[: len(one)])


def disagreement(one: Tensor, other: Tensor, lengths: Tensor) -> Tensor:
    """Compute the consistency loss of two views of each clip, L_CR of CR-CTC (Yao et al. 2024, arXiv:2410.05101).

    It is the mean of the two KL divergences between the views, summed over frames. In each divergence the target view
    has no gradient.

    Args:
        one: [batch, frames, vocabulary] log-probabilities of the first view.
        other: [batch, frames, vocabulary] log-probabilities of the second view.
        lengths: [batch] int64, frames of each clip.

    Returns:
        [batch], in nats.
    """
    towards_other = F.kl_div(one, other.detach(), reduction="none", log_target=True)
    towards_one = F.kl_div(other, one.detach(), reduction="none", log_target=True)
    real = frames_within(lengths, one.shape[1])
    return ((towards_other + towards_one).sum(2) / 2).masked_fill(~real, 0.0).sum(1)


def augmented(batch: Batch, config: Config, device: torch.device, view: int = 0) -> dict[str, Tensor]:
    """Return the network's inputs: augmented features, lengths and, for wav2vec 2.0, masks of frames and channels.

    Each view draws its own masks and warps.

    Returns:
        The arguments of the network's `forward`, by name.
    """
    inputs = {"features": batch.features.to(device), "lengths": batch.lengths.to(device)}
    seeds = [seed + view for seed in batch.seeds]
    if not isinstance(config.model, Wav2Vec2Config):
        assert isinstance(config.features, FeatureSettings)  # `Config` checks this
        features = warp_frequency(inputs["features"], config.features, config.augment, seeds)
        return inputs | {"features": spec_augment(features, inputs["lengths"], config.augment, seeds)}
    frames = [config.model.output_frames(samples) for samples in batch.lengths.tolist()]
    masks = {
        "time_mask": time_mask(frames, max(1, *frames), config.augment.spans, seeds),
        "channel_mask": channel_mask(config.model.width, config.augment.spans, seeds),
    }
    return inputs | {name: mask.to(device) for name, mask in masks.items() if mask is not None}
