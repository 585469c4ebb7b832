"""The interface of every CTC network, and the base class of the convolutional ones.

Input: [batch, channels, frames] features (log-mel, or samples for wav2vec 2.0) and lengths. Output: [batch, frames',
labels] log-probabilities and lengths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.blocks import StackConfig, initialise
from carnelian_training.models.masked import FOLD, Mask, MaskedConv, strided
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set a network to evaluation mode within the context; then each layer, frozen or not, is in its mode again."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class CtcNetwork(nn.Module):
    """The base class of all recognisers."""

    config: StackConfig | Wav2Vec2Config

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of every label at every output frame.

        Args:
            features: [batch, channels, frames] float32.
            lengths: [batch] int64, real frames of each clip.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities and [batch] int64 lengths.
        """
        raise NotImplementedError

    if TYPE_CHECKING:
        __call__ = forward


class StackNetwork(CtcNetwork):
    """A stack of blocks and a 1x1 convolution to the labels. A subclass gives the blocks and :meth:`encode`.

    Of other blocks than :class:`~carnelian_training.models.blocks.Block`, it can be trained, but not exported.
    """

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
        """Compute log-probabilities of `features`, [batch, num_mels, frames] float32, as :class:`CtcNetwork` does.

        The returned lengths are ``ceil(lengths / config.stride)``, even if that is more than frames'.
        """
        # Not -(-a // b): ONNX rounds the quotients of negative integers towards zero.
        log_prob_frames = (features.shape[2] + self.config.stride - 1) // self.config.stride
        if self.training and features.device.type == "cpu" and len(features) < FOLD:
            features = F.pad(features, (0, -features.shape[2] % (FOLD * self.config.body_stride)))
        mask = Mask.from_lengths(lengths, features.shape[2])
        log_probs = self.score(features, mask)[:, :log_prob_frames]
        return log_probs, strided(lengths, self.config.stride)

    def score(self, features: Tensor, mask: Mask) -> Tensor:
        """Compute the log-probability of every label at every output frame, for clips anywhere in the rows.

        A row may hold several clips if each one starts at a multiple of `config.body_stride`, and the gap to the clip
        before it is at least the largest of `config.reaches`. No clip then affects another, because the gap is zero
        before every convolution.

        Args:
            features: [batch, num_mels, frames] float32.
            mask: the frames that belong to a clip.

        Returns:
            [batch, frames', num_labels] float32 log-probabilities.
        """
        # [B, M, T] -> [B, M, 1, T]
        x = mask.apply(features.unsqueeze(2)).to(memory_format=torch.channels_last)
        # [B, n V, 1, T''] -> [B, T'', n V] -> [B, n T'', V]
        logits = self.head(self.encode(x, mask)).squeeze(2).transpose(1, 2)
        logits = logits.reshape(logits.shape[0], -1, logits.shape[2] // self.config.head_frames)
        return F.log_softmax(logits.float(), dim=2)
