"""A transformer whose middle layers see fewer frames (Hourglass: Nawrot et al. 2021, arXiv:2110.13711).

As in NVIDIA's wav2vec 2.0, there is one level of pooling and one width, and the expanded result of the middle layers is
added to their input. In a group of frames that reaches past its clip's end, the missing frames are zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from carnelian_training.models.masked import frames_within, zero_unless


@dataclass(frozen=True, kw_only=True)
class HourglassConfig:
    """The layers of an hourglass transformer that run on pooled frames, and how frames are pooled."""

    before: int = 2
    """The number of layers at the full frame rate before the pooled ones."""
    pooled: int = 8
    """The number of layers that run on pooled frames."""
    after: int = 2
    """The number of layers at the full frame rate after the pooled ones."""
    factor: int = 4
    """The number of frames that are pooled into one."""
    resampling: Literal["mean", "linear"] = "mean"
    """`mean` pools by the mean and expands by repetition; it has no weights, so those of a plain transformer fit.
    `linear` has one dense layer from `factor` frames to one, and another one back."""

    def __post_init__(self) -> None:
        if min(self.before, self.after) < 0 or self.pooled < 1 or self.factor < 2:
            raise ValueError(
                "`before` and `after` must not be negative, `pooled` at least 1 and `factor` at least 2, but they are "
                f"{self.before}, {self.after}, {self.pooled} and {self.factor}"
            )

    @property
    def layers(self) -> int:
        """The number of all layers, pooled or not."""
        return self.before + self.pooled + self.after


class Resampling(nn.Module):
    """Pools groups of `factor` frames into one, and expands them again."""

    def __init__(self, config: HourglassConfig, width: int) -> None:
        super().__init__()
        self.factor = config.factor
        is_linear = config.resampling == "linear"
        self.down = nn.Linear(config.factor * width, width) if is_linear else None
        self.up = nn.Linear(width, config.factor * width) if is_linear else None

    def shorten(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Pool frames [batch, frames, width] to groups [batch, groups, width]; return these and their lengths."""
        batch, frames, width = x.shape
        x = zero_unless(frames_within(lengths, frames)[:, :, None], x)
        # Not -frames % factor: ONNX rounds quotients towards zero.
        groups = (frames + self.factor - 1) // self.factor
        x = F.pad(x, (0, 0, 0, groups * self.factor - frames))
        lengths_after = (lengths + self.factor - 1) // self.factor
        if self.down is not None:
            shortened: Tensor = self.down(x.reshape(batch, groups, self.factor * width))
            return shortened, lengths_after
        return x.reshape(batch, groups, self.factor, width).mean(2), lengths_after

    def expand(self, x: Tensor, frames: int) -> Tensor:
        """Expand pooled frames [batch, groups, width] to [batch, frames, width]."""
        if self.up is not None:
            x = self.up(x).reshape(x.shape[0], -1, x.shape[2])
        else:
            x = x.repeat_interleave(self.factor, dim=1)
        return x[:, :frames]


def run_hourglass(
    x: Tensor,
    lengths: Tensor,
    config: HourglassConfig,
    resampling: Resampling,
    run: Callable[[Tensor, Tensor, int, int], Tensor],
) -> Tensor:
    """Run all layers on `x` [batch, frames, width] with `lengths` [batch] int64, the pooled ones on fewer frames.

    `run` is called with frames, their lengths, a first layer and an end. It runs the layers from the first to before
    the end and returns frames of the same shape.
    """
    end = config.before + config.pooled
    x = run(x, lengths, 0, config.before)
    shorter, shorter_lengths = resampling.shorten(x, lengths)
    shorter = run(shorter, shorter_lengths, config.before, end)
    return run(x + resampling.expand(shorter, x.shape[1]), lengths, end, config.layers)
