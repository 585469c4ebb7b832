"""The configuration of wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477), and the lengths that follow from it."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from carnelian_training.checks import check_at_least_one, check_below_one, check_positive, check_probability
from carnelian_training.models.hourglass import HourglassConfig


@dataclass(frozen=True, kw_only=True)
class Wav2Vec2Config:
    """The configuration of any wav2vec 2.0; the defaults are those of Base."""

    name: Literal["wav2vec2"] = "wav2vec2"
    conv_channels: tuple[int, ...] = (512,) * 7
    """The output channels of the extractor's convolutions, the first convolution first."""
    conv_kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    """The kernel widths of the extractor's convolutions, in frames of their inputs."""
    conv_strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    """The strides of the extractor's convolutions, in frames of their inputs."""
    conv_bias: bool = False
    conv_norm: Literal["group", "layer"] = "group"
    """The extractor's norm. `group` normalises each channel over the clip's frames, after the first convolution only;
    `layer` normalises each frame over its channels, after every convolution."""
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    norm_first: bool = False
    """Whether each layer normalises its input (Large trained on 60,000 hours) instead of its result."""
    adapter_width: int | None = None
    """The inner width of the adapter after each layer, only with `norm_first`; MMS has 16. None: no adapters."""
    position_kernel: int = 128
    """The kernel width of the positional convolution, in frames."""
    position_groups: int = 16
    """The number of groups of the positional convolution."""
    norm_eps: float = 1e-5
    hourglass: HourglassConfig | None = None
    """Pooling of frames in the middle layers. None: the plain transformer, whose layers have the same weights."""
    dropout: float = 0.1
    """The probability of dropout on the output of each attention and feed-forward, and on the first layer's input."""
    attention_dropout: float = 0.1
    """The probability of dropout on attention weights."""
    activation_dropout: float = 0.0
    """The probability of dropout between the two linear layers of a feed-forward."""
    input_dropout: float = 0.0
    """The probability of dropout on the projected output of the extractor."""
    head_dropout: float = 0.0
    """The probability of dropout on the head's input."""
    layer_drop: float = 0.0
    """The probability of skipping a layer in training."""
    extractor_gradient: float = 1.0
    """The factor on the gradient that reaches the extractor; pre-training of Base has 0.1."""

    def __post_init__(self) -> None:
        sizes = [len(self.conv_channels), len(self.conv_kernels), len(self.conv_strides)]
        if len(set(sizes)) > 1 or not sizes[0]:
            raise ValueError(
                f"`conv_channels`, `conv_kernels` and `conv_strides` must be equally long, but have {sizes} entries"
            )
        if min(self.conv_channels) < 1:
            raise ValueError(f"`conv_channels` must be at least 1, but are {list(self.conv_channels)}")
        if any(k < s or s < 1 for k, s in zip(self.conv_kernels, self.conv_strides, strict=True)):
            raise ValueError("`conv_strides` must be at least 1 and at most their `conv_kernels`")
        check_at_least_one(self, "width", "layers", "heads", "feed_forward", "position_kernel", "position_groups")
        check_at_least_one(self, "adapter_width")
        if self.adapter_width is not None and not self.norm_first:
            raise ValueError("`adapter_width` must come with `norm_first`: other layers have no adapters")
        for name in ("heads", "position_groups"):
            if self.width % getattr(self, name):
                raise ValueError(f"`{name}` must divide `width`, {self.width}, but is {getattr(self, name)}")
        check_positive(self, "norm_eps")
        check_below_one(self, "dropout", "attention_dropout", "activation_dropout", "input_dropout", "head_dropout")
        check_probability(self, "layer_drop", "extractor_gradient")
        if self.hourglass is not None and self.hourglass.layers != self.layers:
            raise ValueError(
                f"`hourglass` must divide up all `layers`, {self.layers}, but its parts are {self.hourglass.layers}"
            )

    feature_channels = 1
    """The number of rows of the input: a waveform has one."""
    head_frames = 1
    """The number of output frames that the head makes of each frame."""

    @property
    def stride(self) -> int:
        """The number of samples per output frame."""
        return math.prod(self.conv_strides)

    @property
    def window(self) -> int:
        """The number of samples that the extractor sees for one output frame; a shorter clip has no frame."""
        window = 1
        for kernel, stride in zip(reversed(self.conv_kernels), reversed(self.conv_strides), strict=True):
            window = (window - 1) * stride + kernel
        return window

    def output_frames(self, samples: int) -> int:
        """Return the number of output frames of a clip of `samples` samples."""
        return max(0, (samples - self.window) // self.stride + 1)

    @property
    def num_stages(self) -> int:
        """The number of stages, each of which can be frozen or have its own learning rate.

        They are the extractor (0), the transformer's input (1) and its layers (from 2).
        """
        return 2 + self.layers

    def stage_of(self, name: str) -> int:
        """Return the stage of the parameter `name`; heads and adapters are one past the last stage."""
        if name.startswith("extractor."):
            return 0
        if ".adapter." in name:
            return self.num_stages
        if match := re.match(r"layers\.(\d+)\.", name):
            return 2 + int(match[1])
        if self.norm_first and name.startswith("norm."):  # this norm is then after the layers, not before them
            return 1 + self.layers
        return self.num_stages if name.startswith(("head.", "pretraining.")) else 1
