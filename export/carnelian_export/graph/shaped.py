"""The ragged graph for TensorRT, in which every size follows from the inputs' shapes and none from their values.

TensorRT plans memory and kernels from shapes. A length that is read from a tensor's values would have to be copied to
the CPU first, and kernels could not be tuned for it. So the time axis has room for all features of the batch and for
the widest gap after each clip, and Triton tells the length of the longest clip by the shape of a tensor without content
(`BATCH_MAX_ELEMENT_COUNT_AS_SHAPE`).
"""

import onnx
import torch
from carnelian_training.features import SAMPLE_RATE_HZ
from carnelian_training.models.masked import Mask, strided
from carnelian_training.models.network import CtcNetwork, StackNetwork
from carnelian_training.models.wav2vec2 import Wav2Vec2
from torch import Tensor, nn

from carnelian_export.graph.precision import lower
from carnelian_export.graph.time_axis import count, find_spacing, moved_apart, pack, unpack
from carnelian_export.graph.to_onnx import score_waveforms, trace
from carnelian_export.profiles import MAX_AUDIO_S, SHAPED_INPUTS

MOST_SAMPLES = round(MAX_AUDIO_S * SAMPLE_RATE_HZ)


class ShapedAcoustic(nn.Module):
    """:class:`carnelian_export.graph.to_onnx.RaggedAcoustic` with two more inputs, of which only the shapes matter."""

    def __init__(self, network: StackNetwork, most_frames: int) -> None:
        super().__init__()
        self.network = network
        self.most_frames = most_frames
        self.spacing = find_spacing(network)

    def forward(
        self, features: Tensor, shapes: Tensor, lengths: Tensor, request_sizes: Tensor, longest_request: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score a ragged batch.

        Args:
            features: [total] float32; the rows' [num_mels, frames] tensors, flat, in order.
            shapes: [rows, 2] int32, (num_mels, frames) of each row.
            lengths: [rows, 1] int32, the clip's frames as its sender counts them, which may exceed `frames`.
            request_sizes: [requests], with any values; as many elements as the batch has requests.
            longest_request: [elements], with any values; as many elements as the largest request has features.

        Returns:
            What RaggedAcoustic returns, but features that are not finite pass through the network, and in a batch of
            several requests that have several rows each, rows are padded as if one row had all the features of its
            request.
        """
        config = self.network.config
        rows, mels = lengths.shape[0], config.num_mels
        frames = shapes[:, 1].long()
        counted, real = count(lengths, frames)
        (starts, time), (starts_apart, time_apart) = (
            (
                sum_before(strided(real + gap, config.body_stride) * config.body_stride),
                features.shape[0] // mels + rows * (gap + config.body_stride),
            )
            for gap in (self.spacing.near, self.spacing.far)
        )
        packed, valid = pack(features, sum_before(frames * mels), frames, real, starts, time, mels)
        body = packed.to(next(self.network.parameters()).dtype)
        with moved_apart(self.network, self.spacing, starts, starts_apart, real, time_apart, Mask):
            log_probs = self.network.score(body[None], Mask(valid[None, None, None]))[0]
        # No row is longer than a clip may be. So TensorRT need not reserve memory for one row as long as a whole batch.
        longest = min_of(longest_row(longest_request, request_sizes, rows) // mels, self.most_frames)
        longest = strided(longest, config.stride)  # type: ignore[arg-type, assignment]
        ends, first = strided(real, config.stride), starts_apart // config.stride
        return unpack(log_probs, longest, ends, first), strided(counted, config.stride).int()


class ShapedWaveforms(nn.Module):
    """:class:`carnelian_export.graph.to_onnx.RaggedWaveforms` with the inputs of :class:`ShapedAcoustic`."""

    def __init__(self, network: Wav2Vec2) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, features: Tensor, shapes: Tensor, lengths: Tensor, request_sizes: Tensor, longest_request: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score a ragged batch, as :class:`ShapedAcoustic` does; `features` are samples and `shapes` [rows, 1]."""
        samples = shapes[:, 0].long()
        # The limit saves memory, as in ShapedAcoustic.
        longest = min_of(longest_row(longest_request, request_sizes, lengths.shape[0]), MOST_SAMPLES)
        return score_waveforms(self.network, features, sum_before(samples), samples, lengths, longest)


def longest_row(longest_request: Tensor, request_sizes: Tensor, rows: int) -> int:
    """Return the number of elements in the longest row, or, where requests have several rows each, an upper limit.

    All rows of a request have the same shape. For one request the number is exact; for several, the limit is the number
    of elements in all rows of the largest request.
    """
    # `rows` if there is one request, else 1. It is not written with `1 // request_sizes.shape[0]`, because ONNX Runtime
    # turns `a * (1 // b)` into `a // b`, even for integers.
    rows_of_longest = 1 + (rows - 1) * (2 // (request_sizes.shape[0] + 1))
    return longest_request.shape[0] // rows_of_longest


def min_of(size: int, most: int) -> int:
    """Return the smaller of two sizes; during an export, `size` is a traced tensor and not an int."""
    if isinstance(size, Tensor):
        return size.clamp(max=most)
    return min(size, most)


def sum_before(sizes: Tensor) -> Tensor:
    """Sum all entries before each one, [rows] -> [rows]. TensorRT 10.5 has no cumulative sum of integers."""
    rows = torch.arange(sizes.shape[0])
    return (sizes * (rows < rows[:, None]).long()).sum(1)


def build_shaped(network: CtcNetwork, dtype: torch.dtype, hop_samples: int) -> nn.Module:
    """Wrap a network in a module that takes :data:`SHAPED_INPUTS` and computes in `dtype`.

    `hop_samples` is the number of samples from one frame of features to the next. It sets how many frames a row has at
    most: those of :data:`MAX_AUDIO_S`.
    """
    lowered = lower(network, dtype)
    if isinstance(lowered, StackNetwork):
        return ShapedAcoustic(lowered, MOST_SAMPLES // hop_samples + 1)
    assert isinstance(lowered, Wav2Vec2)
    return ShapedWaveforms(lowered)


def export_shaped(network: CtcNetwork, dtype: torch.dtype, hop_samples: int) -> onnx.ModelProto:
    """Export the graph of a TensorRT `<model>_acoustic` stage, see :func:`build_shaped`."""
    if isinstance(network, StackNetwork):
        mels = network.config.num_mels
        shapes = torch.tensor([[mels, 40], [mels, 64]], dtype=torch.int32)
    else:
        shapes = network.config.stride * torch.tensor([[40], [64]], dtype=torch.int32)
    sizes = shapes.prod(1)
    values = (
        torch.zeros(int(sizes.sum())),
        shapes,
        shapes[:, -1:],
        sizes.int(),
        torch.zeros(int(sizes.max())),
    )
    return trace(build_shaped(network, dtype, hop_samples), dict(zip(SHAPED_INPUTS, values, strict=True)))
