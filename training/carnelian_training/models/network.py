"""The interface of every CTC network, and what the convolutional ones share.

In: [batch, channels, frames] features (log-mel, or samples for wav2vec 2.0) and lengths. Out: [batch, frames', labels]
log-probabilities and lengths.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.blocks import StackConfig, initialise
from carnelian_training.models.masked import FOLD, Mask, MaskedConv, strided


class Architecture(Protocol):
    """What the configuration of every architecture has."""

    @property
    def feature_channels(self) -> int:
        """Rows of its features."""

    @property
    def stride(self) -> int:
        """Feature frames per output frame."""

    @property
    def head_frames(self) -> int:
        """Output frames that the head makes of each frame of the last stage."""

    @property
    def num_stages(self) -> int:
        """How many parts freeze and learn at a rate of their own, the head aside."""

    def stage_of(self, name: str) -> int:
        """The stage of a parameter, by its name; the head comes after the last."""

    def output_frames(self, frames: int) -> int:
        """Output frames of a clip with `frames` of features."""


class CtcNetwork(nn.Module):
    """The base class of all recognisers."""

    config: Architecture

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every label at every frame.

        Args:
            features: [batch, channels, frames] float32.
            lengths: [batch] int64, real frames of each clip.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities and [batch] int64 lengths.
        """
        raise NotImplementedError


class StackNetwork(CtcNetwork):
    """A stack of blocks and a 1x1 convolution to the labels. An architecture brings the blocks and :meth:`encode`."""

    config: StackConfig

    def __init__(self, config: StackConfig, blocks: nn.ModuleList, num_labels: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = blocks
        self.head = MaskedConv(config.stages[-1].filters, num_labels * config.head_frames, 1, bias=True)
        self.apply(initialise)

    def encode(self, x: Tensor, mask: Mask) -> Tensor:
        """Run the blocks: [batch, mels, 1, frames], zero in the padding -> [batch, channels, 1, frames'']."""
        raise NotImplementedError

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Score every label at every frame.

        Args:
            features: [batch, num_mels, frames] float32.
            lengths: [batch] int64, real frames of each clip.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities and [batch] int64 lengths,
            ``lengths' = ceil(lengths / config.stride)``, whether or not that many frames are there.
        """
        mask = Mask.from_lengths(lengths, features.shape[2])
        # Not -(-a // b): ONNX rounds the quotients of negative integers up.
        log_prob_frames = (features.shape[2] + self.config.stride - 1) // self.config.stride
        if self.training and features.device.type == "cpu" and len(features) < FOLD:
            features = F.pad(features, (0, -features.shape[2] % (FOLD * self.config.body_stride)))
            mask = Mask.from_lengths(lengths, features.shape[2])
        log_probs = self.score(features, mask)[:, :log_prob_frames]
        return log_probs, strided(lengths, self.config.stride)

    def score(self, features: Tensor, mask: Mask) -> Tensor:
        """Score every label at every frame, wherever in the rows the clips lie.

        A row may hold several clips if each starts at a multiple of `config.body_stride` and at least as far after the
        one before it as the widest of `config.reaches`. No clip then touches another: the gap is zero before every
        convolution.

        Args:
            features: [batch, num_mels, frames] float32.
            mask: which frames are a clip's.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities.
        """
        # [B, M, T] -> [B, M, 1, T]
        x = mask.apply(features.unsqueeze(2)).to(memory_format=torch.channels_last)
        # [B, n V, 1, T''] -> [B, T'', n V] -> [B, n T'', V]
        logits = self.head(self.encode(x, mask)).squeeze(2).transpose(1, 2)
        logits = logits.reshape(logits.shape[0], -1, logits.shape[2] // self.config.head_frames)
        return F.log_softmax(logits.float(), dim=2)
