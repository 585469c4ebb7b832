"""wav2vec 2.0: a convolutional extractor over samples and a transformer (Baevski et al. 2020, arXiv:2006.11477).

Input: [batch, 1, samples] waveforms and lengths. Every norm over time, every convolution and every attention sees only
the clip's own frames, so a clip gives the same result alone and in a batch. The weights are those of fairseq and of
Hugging Face's `transformers`, under other names (`foreign/wav2vec2_keys.py` maps them).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.hourglass import Resampling, run_hourglass
from carnelian_training.models.masked import frames_within, zero_unless
from carnelian_training.models.network import CtcNetwork
from carnelian_training.models.wav2vec2_config import Wav2Vec2Config

NORM_FRAMES = 32
"""The frames that :class:`ClipNorm` gets are a multiple of this, itself a multiple of the lanes in which ONNX Runtime
sums. So more padding moves no number to another lane, and the sums are the same to the bit. A last bit can move a
number to another step of int8, which changes others in each layer that follows, and then labels."""


class ClipNorm(nn.Module):
    """Group norm with one group per channel, over the clip's own frames only."""

    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Normalise `x` [batch, channels, frames]; frames past `lengths` [batch] all get the same value per channel."""
        valid = frames_within(lengths, x.shape[2])[:, None]
        count = lengths.clamp(min=1)[:, None, None].float()
        x = zero_unless(valid, x.float())
        mean = x.sum(2, keepdim=True) / count
        centred = (x - mean) * valid  # `x` is finite in the padding, and ONNX Runtime's `Where` is slow
        # ONNX Runtime's sum of 190,000 equal numbers has an error of 1e-4, which changes the log-probabilities of
        # silence with an offset by 0.7. So the mean of the centred values is subtracted too. It is merged into the
        # bias, so that no other tensor of this size is written.
        rest = centred.sum(2, keepdim=True) / count
        variance = (centred * centred).sum(2, keepdim=True) / count - rest * rest
        scale = torch.rsqrt(variance + self.eps) * self.weight[:, None]
        return centred * scale + (self.bias[:, None] - rest * scale)


class ConvLayer(nn.Module):
    """A convolution without padding, then a norm if the configuration has one here, then GELU."""

    def __init__(self, config: Wav2Vec2Config, i: int) -> None:
        super().__init__()
        channels, kernel = config.conv_channels[i], config.conv_kernels[i]
        self.stride, self.kernel = config.conv_strides[i], kernel
        self.weight = nn.Parameter(torch.empty(channels, (1, *config.conv_channels)[i], kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if config.conv_bias else None
        self.clip_norm = ClipNorm(channels) if config.conv_norm == "group" and i == 0 else None
        self.frame_norm = nn.LayerNorm(channels) if config.conv_norm == "layer" else None
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Transform `x` [batch, channels, frames] with `lengths` [batch]; return the new frames and lengths."""
        # In 2-D, because ONNX Runtime's and oneDNN's kernels for 1-D convolutions are slower (see `masked.py`).
        x = F.conv2d(x.unsqueeze(2), self.weight.unsqueeze(2), self.bias, (1, self.stride)).squeeze(2)
        # The dividend must not be negative: ONNX rounds the quotients of negative integers towards zero.
        lengths = (lengths - self.kernel + self.stride).clamp(min=0) // self.stride
        if self.clip_norm is not None:
            x = self.clip_norm(x, lengths)
        if self.frame_norm is not None:
            x = self.frame_norm(x.transpose(1, 2)).transpose(1, 2)
        return F.gelu(x), lengths


class PositionalConv(nn.Module):
    """Positional embedding: a wide grouped convolution with weight norm over all axes but the kernel's."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.groups, self.kernel = config.position_groups, config.position_kernel
        self.direction = nn.Parameter(torch.empty(config.width, config.width // self.groups, self.kernel))
        nn.init.normal_(self.direction, std=math.sqrt(4 / (self.kernel * config.width)))
        self.magnitude = nn.Parameter(self.direction.detach().norm(dim=(0, 1), keepdim=True))
        self.bias = nn.Parameter(torch.zeros(config.width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the positional embedding of `x` [batch, frames, width], zero in its padding; the same shape."""
        return self.convolve(x, self.weight())

    def weight(self) -> Tensor:
        """Compute the convolution's weight [width, width / groups, kernel] from magnitude and direction."""
        norm = self.direction.square().sum((0, 1), keepdim=True).sqrt()
        return self.magnitude * self.direction / norm

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the positional embedding of `x` [batch, frames, width] with a given `weight`."""
        x = x.transpose(1, 2).unsqueeze(2)
        x = F.conv2d(x, weight.unsqueeze(2), self.bias, padding=(0, self.kernel // 2), groups=self.groups).squeeze(2)
        if self.kernel % 2 == 0:  # an even kernel gives one frame too many
            x = x[..., :-1]
        return F.gelu(x).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over a clip's own frames."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Transform `x` [batch, frames, width]; `mask` [batch, 1, 1, frames] is 0 for a clip's frames, else -inf."""
        batch, frames, width = x.shape
        # [B, T, D] -> [B, H, T, D / H]
        query, key, value = (
            project(x).view(batch, frames, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        mixed: Tensor = self.output(x.transpose(1, 2).reshape(batch, frames, width))
        return mixed


class Adapter(nn.Module):
    """A bottleneck added to its input. MMS has one set per language (Pratap et al. 2023, arXiv:2305.13516)."""

    def __init__(self, width: int, adapter_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.narrow = nn.Linear(width, adapter_width)
        self.widen = nn.Linear(adapter_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform `x` [batch, frames, width] into the same shape."""
        adapted: Tensor = x + self.widen(F.relu(self.narrow(self.norm(x))))
        return adapted


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input, with layer norm after (Base) or before."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.norm_first, self.dropout = config.norm_first, config.dropout
        self.activation_dropout = config.activation_dropout
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.widen = nn.Linear(config.width, config.feed_forward)
        self.narrow = nn.Linear(config.feed_forward, config.width)
        self.output_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.adapter = None if config.adapter_width is None else Adapter(config.width, config.adapter_width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Transform `x` [batch, frames, width]; `mask` [batch, 1, 1, frames] is 0 for a clip's frames, else -inf."""
        if self.norm_first:
            x = x + self._dropped(self.attention(self.attention_norm(x), mask))
            x = x + self._feed_forward(self.output_norm(x))
            return x if self.adapter is None else self.adapter(x)
        x = self.attention_norm(x + self._dropped(self.attention(x, mask)))
        normalised: Tensor = self.output_norm(x + self._feed_forward(x))
        return normalised

    def _feed_forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.widen(x)), self.activation_dropout, self.training)
        return self._dropped(self.narrow(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Wav2Vec2Body(nn.Module):
    """wav2vec 2.0 without its head: extractor and transformer, from samples to vectors."""

    config: Wav2Vec2Config

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.config = config
        channels = config.conv_channels[-1]
        self.extractor = nn.ModuleList(ConvLayer(config, i) for i in range(len(config.conv_channels)))
        self.extractor_norm = nn.LayerNorm(channels, config.norm_eps)
        self.projection = nn.Linear(channels, config.width)
        self.mask_embedding = nn.Parameter(torch.empty(config.width).uniform_())
        self.positions = PositionalConv(config)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.resampling = Resampling(config.hourglass, config.width) if config.hourglass is not None else None
        self.layers.apply(initialise)

    def extract(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Run the extractor: samples to frames.

        Args:
            waveforms: [batch, 1, samples] float32.
            lengths: [batch] int64, samples of each clip.

        Returns:
            [batch, frames, channels], with at least one frame, and [batch] int64 lengths in frames, 0 for a clip that
            is too short for a frame.
        """
        # A batch in which every clip is too short still gets one frame, so that the network can run. The first
        # convolution gives a multiple of `NORM_FRAMES`.
        kernel, stride = self.config.conv_kernels[0], self.config.conv_strides[0]
        piece, samples = NORM_FRAMES * stride, waveforms.shape[2]
        padded = (samples + self.config.window + piece - 1) // piece * piece + kernel - stride
        x = F.pad(waveforms, (0, padded - samples))
        for layer in self.extractor:
            x, lengths = layer(x, lengths)
        if self.config.extractor_gradient != 1.0 and self.training:
            x = x.detach() + self.config.extractor_gradient * (x - x.detach())
        frames = (waveforms.shape[2] - self.config.window + self.config.stride) // self.config.stride
        return x.transpose(1, 2)[:, : max_of(frames, 1)], lengths

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Return the output frames of clips of `lengths` samples; both are [batch] integers."""
        # The dividend must not be negative: ONNX rounds the quotients of negative integers towards zero.
        return (lengths - self.config.window + self.config.stride).clamp(min=0) // self.config.stride

    def encode(
        self, x: Tensor, lengths: Tensor, time_mask: Tensor | None = None, channel_mask: Tensor | None = None
    ) -> Tensor:
        """Run the transformer: frames to vectors in context.

        Args:
            x: [batch, frames, channels], the extractor's frames after `extractor_norm`.
            lengths: [batch] int64, frames of each clip.
            time_mask: [batch, frames] bool, frames to replace by the learnt mask embedding.
            channel_mask: [batch, width] bool, channels to zero.

        Returns:
            [batch, frames, width]; values past `lengths` are meaningless.
        """
        x = F.dropout(self.projection(x), self.config.input_dropout, self.training)
        if time_mask is not None:
            x = torch.where(time_mask[:, :, None], self.mask_embedding.to(x.dtype), x)
        elif self.training:
            x = x + 0.0 * self.mask_embedding.sum()  # a gradient of zero, for the reason in `_run`
        if channel_mask is not None:
            x = x.masked_fill(channel_mask[:, None], 0.0)
        x = zero_unless(frames_within(lengths, x.shape[1])[:, :, None], x)
        x = x + self.positions(x)
        if not self.config.norm_first:
            x = self.norm(x)
        x = F.dropout(x, self.config.dropout, self.training)
        if self.config.hourglass is not None and self.resampling is not None:
            x = run_hourglass(x, lengths, self.config.hourglass, self.resampling, self._run)
        else:
            x = self._run(x, lengths, 0, self.config.layers)
        return self.norm(x) if self.config.norm_first else x

    def _run(self, x: Tensor, lengths: Tensor, start: int, end: int) -> Tensor:
        """Run the layers from number `start` to before `end`."""
        # A clip without frames sees one frame, because attention to nothing would be NaN. The mask is one to add: for a
        # boolean one, PyTorch exports a guard against NaN over [batch, heads, frames, frames] in each layer.
        seen = frames_within(lengths.clamp(min=1), x.shape[1])[:, None, None]
        mask = torch.where(seen, 0.0, -torch.inf).to(x.dtype)
        for layer in self.layers[start:end]:
            if self.training and self.config.layer_drop and torch.rand(()) < self.config.layer_drop:
                # Distributed training waits for a gradient of every parameter, so a skipped layer gets zeros.
                x = x + 0.0 * torch.stack([p.flatten()[0] for p in layer.parameters()]).sum()
            else:
                x = layer(x, mask)
        return x


class Wav2Vec2(Wav2Vec2Body, CtcNetwork):
    """A wav2vec 2.0 recogniser: the body and a linear head. Base with 32 labels has 94,396,320 parameters."""

    config: Wav2Vec2Config

    def __init__(self, config: Wav2Vec2Config, num_labels: int) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, num_labels)
        initialise(self.head)

    def forward(
        self,
        features: Tensor,
        lengths: Tensor,
        time_mask: Tensor | None = None,
        channel_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities as :class:`CtcNetwork` does.

        `features` are waveforms, [batch, 1, samples] float32, and `lengths` count samples. The padding may hold any
        values. In training, `time_mask` [batch, frames'] bool gives frames to replace by the mask embedding, and
        `channel_mask` [batch, width] bool channels to zero.
        """
        x, lengths = self.extract(features, lengths)
        x = self.encode(self.extractor_norm(x), lengths, time_mask, channel_mask)
        logits = self.head(F.dropout(x, self.config.head_dropout, self.training))
        return F.log_softmax(logits.float(), dim=2), lengths


def initialise(module: nn.Module) -> None:
    """Initialise a linear layer as BERT does (standard deviation 0.02, bias 0); leave other modules unchanged."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def max_of(size: int, least: int) -> int:
    """Return the larger of two sizes; `size` is a tensor while a graph is exported."""
    if isinstance(size, Tensor):
        return size.clamp(min=least)
    return max(size, least)
