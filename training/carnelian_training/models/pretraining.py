"""Pre-training of wav2vec 2.0: a contrastive loss over masked ("hidden") frames (Baevski et al. 2020, section 3.2).

For each hidden frame, the transformer's output has to be more similar to the frame's own quantised vector than to those
of other hidden frames of the clip, the negatives. Everything random about a clip (Gumbel noise, the choice of
negatives) is drawn from its own seed, and every result is a sum over one clip, so a step is the same however its clips
are dealt out to parts and processes (`contrastive.py` adds them up).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.checks import check_at_least_one, check_below_one, check_not_negative, check_positive
from carnelian_training.models.masked import frames_within, zero_unless
from carnelian_training.models.wav2vec2 import Wav2Vec2Body, initialise
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """The configuration of pre-training: quantiser, negatives and loss. The defaults are those of Base."""

    groups: int = 2
    """The number of codebooks; a quantised frame has one code of each."""
    codes: int = 320
    """The number of codes in each codebook."""
    code_width: int = 256
    """The width of a quantised frame: the codes of all groups together."""
    width: int = 256
    """The width of the projected vectors whose similarity is computed."""
    feature_dropout: float = 0.1
    """The probability of dropout on the quantiser's input."""
    negatives: int = 100
    """The number of other hidden frames of the clip that each hidden frame is compared with."""
    similarity_temperature: float = 0.1
    """The temperature that cosine similarities are divided by."""
    diversity_weight: float = 0.1
    """The weight of the diversity loss, which asks for equal use of all codes."""
    penalty_weight: float = 10.0
    """The weight of the feature penalty, the mean square of the extractor's output; Large has 0."""
    temperature: tuple[float, float] = (2.0, 0.5)
    """The temperature of the Gumbel softmax at the first step, and the lowest that it falls to."""
    temperature_decay: float = 0.999995
    """The factor by which the temperature of the Gumbel softmax falls in each step."""
    crop_s: float = 15.6
    """The length in seconds to which longer clips are cut, at a new place in each epoch."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "groups", "codes", "code_width", "width", "negatives")
        check_positive(self, "similarity_temperature", "crop_s")
        check_not_negative(self, "diversity_weight", "penalty_weight")
        check_below_one(self, "feature_dropout")
        if self.code_width % self.groups:
            raise ValueError(f"`groups` must divide `code_width`, {self.code_width}, but is {self.groups}")
        if not 0 < self.temperature[1] <= self.temperature[0] < math.inf or not 0 < self.temperature_decay <= 1:
            raise ValueError(
                "`temperature` must fall from one positive number to another and `temperature_decay` lie within 0 to "
                f"1, but they are {list(self.temperature)} and {self.temperature_decay}"
            )

    def temperature_at(self, step: int) -> float:
        """Return the temperature of the Gumbel softmax at `step`, counted from 0."""
        start, end = self.temperature
        return max(end, start * self.temperature_decay**step)


class Contrast(NamedTuple):
    """Sums of a batch for the losses and figures of pre-training, one per clip. Padding is never counted."""

    loss: Tensor
    """[batch] float32: the contrastive (InfoNCE) loss, summed over hidden frames."""
    penalty: Tensor
    """[batch] float32: the mean square of the extractor's output."""
    usage: Tensor
    """[batch, groups, codes] float32: the probability of each code, summed over hidden frames."""
    chosen: Tensor
    """[batch, groups, codes] float32: the number of hidden frames of which each code was the most probable."""
    hidden: Tensor
    """[batch] float32: the number of hidden frames."""
    hits: Tensor
    """[batch] float32: the number of hidden frames whose own vector was more similar than those of all negatives with
    other codes. A hidden frame without such negatives does not count."""


class Codes(NamedTuple):
    """The quantised hidden frames of a batch, padded to the largest number of hidden frames in a clip."""

    vectors: Tensor
    """[batch, hidden, code_width]: the codes' vectors, of all groups side by side."""
    ids: Tensor
    """[batch, hidden, groups] int64: the index of each chosen code."""
    probabilities: Tensor
    """[batch, hidden, groups, codes] float32: the softmax of the scores without Gumbel noise."""


class Quantiser(nn.Module):
    """Product quantisation: chooses the most probable code of each group, with Gumbel noise in training."""

    def __init__(self, channels: int, config: PretrainingConfig) -> None:
        super().__init__()
        self.groups, self.codes = config.groups, config.codes
        self.choose = nn.Linear(channels, config.groups * config.codes)
        nn.init.normal_(self.choose.weight)
        nn.init.zeros_(self.choose.bias)
        self.vectors = nn.Parameter(
            torch.empty(config.groups, config.codes, config.code_width // config.groups).uniform_()
        )

    def forward(self, x: Tensor, temperature: float, noise: Tensor | None) -> Codes:
        """Quantise `x` [batch, hidden, channels].

        Args:
            x: the hidden frames.
            temperature: temperature of the Gumbel softmax.
            noise: Gumbel noise [batch, hidden, groups, codes]; None: choose without noise.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = self.choose(x.float()).unflatten(2, (self.groups, self.codes))
            if noise is not None:
                soft = F.softmax((logits + noise) / temperature, dim=3)
                ids = soft.argmax(3)
                hard = F.one_hot(ids, self.codes).float()
                choice = hard + soft - soft.detach()  # straight-through: its gradient is that of the soft choice
            else:
                ids = logits.argmax(3)
                choice = F.one_hot(ids, self.codes).float()
            vectors = torch.einsum("bhgc,gcd->bhgd", choice, self.vectors).flatten(2)
            return Codes(vectors, ids, F.softmax(logits, dim=3))


class Wav2Vec2Pretraining(Wav2Vec2Body):
    """wav2vec 2.0 for pre-training: the body, a quantiser, and projections of guess and target to the compared width.

    Base has 95,044,608 parameters.
    """

    def __init__(self, config: Wav2Vec2Config, pretraining: PretrainingConfig) -> None:
        super().__init__(config)
        self.pretraining = nn.ModuleDict(
            {
                "quantiser": Quantiser(config.conv_channels[-1], pretraining),
                "target": nn.Linear(pretraining.code_width, pretraining.width),
                "guess": nn.Linear(config.width, pretraining.width),
            }
        )
        self.pretraining["target"].apply(initialise)
        self.pretraining["guess"].apply(initialise)
        self.settings = pretraining

    def usage(self, features: Tensor, lengths: Tensor, time_mask: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        """Return the sum of each code's probability over a batch, [groups, codes], and the number of hidden frames.

        The diversity loss needs these sums of a whole step, so this runs before :meth:`forward` if a step has several
        parts. With the same state of the random generator, both draw the same dropout.
        """
        frames = self.extract(features, lengths)[0]
        index, real = hidden_frames(time_mask)
        codes = self._quantise(self.extractor_norm(frames), index, 1.0, None)
        return (codes.probabilities * real[:, :, None, None]).sum((0, 1)), real.sum()

    def forward(
        self,
        features: Tensor,
        lengths: Tensor,
        time_mask: Tensor,
        channel_mask: Tensor | None = None,
        *,
        seeds: Sequence[int],
        temperature: float = 1.0,
    ) -> Contrast:
        """Compare the network's guess for every hidden frame with the frame's quantised vector and with negatives.

        Args:
            features: [batch, 1, samples] float32 waveforms.
            lengths: [batch] int64, samples of each clip.
            time_mask: [batch, frames] bool, the hidden frames.
            channel_mask: [batch, width] bool, the channels to zero, or None.
            seeds: the seed of each clip's noise and negatives.
            temperature: temperature of the Gumbel softmax.
        """
        frames, ends = self.extract(features, lengths)
        valid = frames_within(ends, frames.shape[1])
        penalty = zero_unless(valid, frames.float().square().mean(2)).sum(1) / ends.clamp(min=1)
        normalised = self.extractor_norm(frames)
        index, real = hidden_frames(time_mask)
        generators = [torch.Generator(frames.device).manual_seed(seed) for seed in seeds]
        noise = gumbel_noise(generators, real, self.settings) if self.training else None
        codes = self._quantise(normalised, index, temperature, noise)
        context = self.encode(normalised, ends, time_mask, channel_mask)
        guesses = self.pretraining["guess"](pick(context, index))
        others = draw_others(generators, real, self.settings.negatives)
        loss, hits = self._compare(guesses, self.pretraining["target"](codes.vectors), codes.ids, others, real)
        weight = real[:, :, None, None]
        chosen = F.one_hot(codes.probabilities.argmax(3), self.settings.codes) * weight
        usage = (codes.probabilities * weight).sum(1)
        return Contrast(loss, penalty, usage, chosen.sum(1), real.sum(1), hits)

    def _quantise(self, normalised: Tensor, index: Tensor, temperature: float, noise: Tensor | None) -> Codes:
        x = F.dropout(normalised, self.settings.feature_dropout, self.training)
        codes: Codes = self.pretraining["quantiser"](pick(x, index), temperature, noise)
        return codes

    def _compare(
        self, guesses: Tensor, targets: Tensor, ids: Tensor, others: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the InfoNCE loss and the number of hits, each summed over the hidden frames of a clip, [batch]."""
        with torch.autocast(guesses.device.type, enabled=False):
            guesses, targets = F.normalize(guesses.float(), dim=2), F.normalize(targets.float(), dim=2)
            # One matrix product gives the similarity of all pairs of hidden frames; picking the drawn ones from it is
            # cheaper than copying the vectors of the negatives.
            similar = guesses @ targets.transpose(1, 2) / self.settings.similarity_temperature
            same = (ids[:, :, None] == ids[:, None]).all(3)  # a frame with the same codes is no negative
            positive = similar.diagonal(dim1=1, dim2=2)[:, :, None]
            negative = similar.masked_fill(same, -torch.inf).gather(2, others)
            logits = torch.cat([positive, negative], dim=2)
            loss = (torch.logsumexp(logits, dim=2) - positive.squeeze(2)) * real
            hardest = negative.amax(2)
            # `hardest` is -inf if every negative has the frame's own codes; such a frame does not count as a hit.
            hits = (positive.squeeze(2) > hardest) * hardest.isfinite() * real
        return loss.sum(1), hits.sum(1)


def hidden_frames(time_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the positions of the hidden frames of `time_mask`, [batch, frames] bool.

    Returns:
        [batch, hidden] int64, their positions in order, padded to the largest number in a clip (at least 1); and
        [batch, hidden] float32, 1 for a hidden frame and 0 for padding.
    """
    counts = time_mask.sum(1)
    most = max(1, int(counts.max()))
    index = time_mask.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return index, frames_within(counts, index.shape[1]).float()


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Select frames of each clip by position: [batch, frames, width], [batch, hidden] -> [batch, hidden, width]."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


def gumbel_noise(generators: Sequence[torch.Generator], real: Tensor, config: PretrainingConfig) -> Tensor:
    """Draw Gumbel noise for each clip from its own generator.

    Args:
        generators: one per clip.
        real: [batch, hidden] float32, 1 for a hidden frame and 0 for padding.
        config: number of groups and codes.

    Returns:
        [batch, hidden, groups, codes] float32, zero in the padding.
    """
    noise = torch.zeros(*real.shape, config.groups, config.codes, device=real.device)
    for row, generator, count in zip(noise, generators, real.sum(1).long().tolist(), strict=True):
        row[:count].exponential_(generator=generator).clamp_(min=1e-20).log_().neg_()
    return noise


def draw_others(generators: Sequence[torch.Generator], real: Tensor, negatives: int) -> Tensor:
    """Draw the negatives of each hidden frame from the other hidden frames of its clip, each equally likely.

    Args:
        generators: one per clip.
        real: [batch, hidden] float32, 1 for a hidden frame and 0 for padding.
        negatives: how many to draw, with repetition.

    Returns:
        [batch, hidden, negatives] int64, indices of hidden frames; 0 for the only one of a clip and in padding.
    """
    others = torch.zeros(*real.shape, negatives, dtype=torch.int64, device=real.device)
    for row, generator, count in zip(others, generators, real.sum(1).long().tolist(), strict=True):
        if count > 1:
            drawn = torch.randint(count - 1, (count, negatives), generator=generator, device=real.device)
            itself = torch.arange(count, device=real.device)[:, None]
            row[:count] = drawn + (drawn >= itself)  # skips the frame itself
    return others
