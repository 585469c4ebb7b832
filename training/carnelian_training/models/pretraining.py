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
from carnelian_training.models.wav2vec2 import Wav2Vec2Body, Wav2Vec2Config, frames_within, initialise


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """What pre-training adds to the network and to the loss; the defaults are those of Base."""

    groups: int = 2
    """Codebooks; a quantised frame is one code of each."""
    codes: int = 320
    """In each group."""
    code_width: int = 256
    """Of a quantised frame, all groups together."""
    width: int = 256
    """Of the vectors that are compared."""
    feature_dropout: float = 0.1
    """Of what the quantiser sees."""
    negatives: int = 100
    """Negatives: other hidden frames of the clip that each hidden frame is compared with."""
    similarity_temperature: float = 0.1
    """Divides cosine similarities."""
    diversity_weight: float = 0.1
    penalty_weight: float = 10.0
    """Of the mean square of the extractor's result; Large has 0."""
    temperature: tuple[float, float] = (2.0, 0.5)
    """Of the Gumbel softmax, from and to."""
    temperature_decay: float = 0.999995
    """Its factor per step."""
    crop_s: float = 15.6
    """Longer clips are cut to this length, anew in each epoch."""

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
        """Of `step`, from 0."""
        start, end = self.temperature
        return max(end, start * self.temperature_decay**step)


class Contrast(NamedTuple):
    """What a batch of clips gave, clip by clip; padding counts nowhere."""

    loss: Tensor
    """[batch] float32: InfoNCE, summed over hidden frames."""
    penalty: Tensor
    """[batch] float32: mean square of the extractor's result."""
    usage: Tensor
    """[batch, groups, codes] float32: probability of each code, summed over hidden frames."""
    chosen: Tensor
    """[batch, groups, codes] float32: how often each code was the likeliest."""
    hidden: Tensor
    """[batch] float32, hidden frames."""
    hits: Tensor
    """[batch] float32, hidden frames whose own vector was more similar than that of any negative with other codes; one
    without such negatives is no hit."""


class Codes(NamedTuple):
    """Quantised frames of a batch, padded to the most hidden ones of a clip."""

    vectors: Tensor
    """[batch, hidden, code_width]."""
    ids: Tensor
    """[batch, hidden, groups] int64."""
    probabilities: Tensor
    """[batch, hidden, groups, codes] float32, without noise."""


class Quantiser(nn.Module):
    """Product quantisation: of each group the likeliest code, with Gumbel noise while it learns."""

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
        """Quantise `x` [batch, hidden, channels]; `noise` [batch, hidden, groups, codes] is Gumbel's."""
        with torch.autocast(x.device.type, enabled=False):
            logits = self.choose(x.float()).unflatten(2, (self.groups, self.codes))
            if noise is not None:
                soft = F.softmax((logits + noise) / temperature, dim=3)
                ids = soft.argmax(3)
                hard = F.one_hot(ids, self.codes).float()
                choice = hard + soft - soft.detach()  # the gradient is that of the soft choice
            else:
                ids = logits.argmax(3)
                choice = F.one_hot(ids, self.codes).float()
            vectors = torch.einsum("bhgc,gcd->bhgd", choice, self.vectors).flatten(2)
            return Codes(vectors, ids, F.softmax(logits, dim=3))


class Wav2Vec2Pretraining(Wav2Vec2Body):
    """The body of wav2vec 2.0, a quantiser, and projections of what is compared. Base has 95,044,608 parameters."""

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
        """The sum of each code's probability over a batch, [groups, codes], and the number of hidden frames.

        Run before :meth:`forward` where a step has several parts. Its dropout is what `forward` draws first.
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
        """Compare the network's guess of every hidden frame with its quantised vector and with negatives.

        Args:
            features: [batch, 1, samples] float32 waveforms.
            lengths: [batch] int64, samples of each clip.
            time_mask: [batch, frames] bool, the hidden frames.
            channel_mask: [batch, width] bool or None.
            seeds: one per clip.
            temperature: of the Gumbel softmax.
        """
        frames, ends = self.extract(features, lengths)
        valid = frames_within(ends, frames.shape[1])
        squares = torch.where(valid, frames.float().square().mean(2), torch.zeros((), device=frames.device))
        penalty = squares.sum(1) / ends.clamp(min=1)
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
        """InfoNCE: [batch] sums of the loss and of hits."""
        with torch.autocast(guesses.device.type, enabled=False):
            guesses, targets = F.normalize(guesses.float(), dim=2), F.normalize(targets.float(), dim=2)
            # All pairs of hidden frames, of which the drawn ones are picked: a matrix product instead of copies.
            similar = guesses @ targets.transpose(1, 2) / self.settings.similarity_temperature
            same = (ids[:, :, None] == ids[:, None]).all(3)  # the same codes are no others
            positive = similar.diagonal(dim1=1, dim2=2)[:, :, None]
            negative = similar.masked_fill(same, -torch.inf).gather(2, others)
            logits = torch.cat([positive, negative], dim=2)
            loss = (torch.logsumexp(logits, dim=2) - positive.squeeze(2)) * real
            hardest = negative.amax(2)
            # Infinite where no other has other codes: to find one's own among none is no skill.
            hits = (positive.squeeze(2) > hardest) * hardest.isfinite() * real
        return loss.sum(1), hits.sum(1)


def hidden_frames(time_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where hidden frames are.

    Returns:
        [batch, hidden] int64, their positions in order, padded to the most of a clip, at least one; and [batch, hidden]
        float32, 1 where there is one.
    """
    counts = time_mask.sum(1)
    most = max(1, int(counts.max()))
    index = time_mask.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return index, frames_within(counts, index.shape[1]).float()


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Frames of each clip: [batch, frames, width], [batch, hidden] -> [batch, hidden, width]."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


def gumbel_noise(generators: Sequence[torch.Generator], real: Tensor, config: PretrainingConfig) -> Tensor:
    """[batch, hidden, groups, codes] float32, of each clip from its own generator, zero where there is no frame."""
    noise = torch.zeros(*real.shape, config.groups, config.codes, device=real.device)
    for row, generator, count in zip(noise, generators, real.sum(1).long().tolist(), strict=True):
        row[:count].exponential_(generator=generator).clamp_(min=1e-20).log_().neg_()
    return noise


def draw_others(generators: Sequence[torch.Generator], real: Tensor, negatives: int) -> Tensor:
    """For each hidden frame, which other ones of its clip: [batch, hidden, negatives] int64; itself if it is alone."""
    others = torch.zeros(*real.shape, negatives, dtype=torch.int64, device=real.device)
    for row, generator, count in zip(others, generators, real.sum(1).long().tolist(), strict=True):
        if count > 1:
            drawn = torch.randint(count - 1, (count, negatives), generator=generator, device=real.device)
            itself = torch.arange(count, device=real.device)[:, None]
            row[:count] = drawn + (drawn >= itself)  # all but itself, each as likely
    return others
