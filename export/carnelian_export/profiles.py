"""The shapes of batches that a GPU is prepared for: profiles of TensorRT engines, and steps for the CUDA provider."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carnelian_training.features import SAMPLE_RATE_HZ

MAX_AUDIO_S = 60.0
"""The longest clip that is served, in seconds; audio_decode has the same limit."""
SHAPED_INPUTS = ("FEATURES", "FEATURES_SHAPE", "FEATURE_LENGTH", "REQUEST_SIZES", "LONGEST_REQUEST")
"""The inputs of the engine. Triton's `batch_input` makes FEATURES_SHAPE and the last two."""
STEPS = (2048, 8192, 32768, 65536)
"""The lengths of the time axis in a graph for ONNX Runtime's CUDA provider, in feature frames with the gaps between
clips: 20 s to 11 min where a hop is 10 ms. A longer batch gets a multiple of the last one. The steps are wide, since a
GPU computes four times the frames in less than it takes to prepare a network's convolutions once."""
Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""The smallest, the tuned and the largest shape of each of :data:`SHAPED_INPUTS`."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The shapes that an engine is tuned for, and their limits. Triton takes the nearest profile that fits a batch."""

    rows: int
    """The number of rows that the engine is tuned for."""
    seconds: float
    """The length of each row that the engine is tuned for, in seconds."""
    most_s: float
    """The largest total length of all rows, in seconds."""


def choose_profiles(max_batch_size: int) -> list[Profile]:
    """Cover all batches that the configuration allows, from one frame to `max_batch_size` of the longest clips."""
    most_s = max_batch_size * MAX_AUDIO_S
    return [
        Profile(rows=1, seconds=2.0, most_s=8.0),
        Profile(rows=1, seconds=16.7, most_s=MAX_AUDIO_S),
        Profile(rows=min(8, max_batch_size), seconds=7.0, most_s=min(200.0, most_s)),
        Profile(rows=max_batch_size, seconds=16.7, most_s=most_s),
    ]


def shapes_of(profile: Profile, max_batch_size: int, num_mels: int | None, hop_samples: int) -> Shapes:
    """Convert a profile to the smallest, the tuned and the largest shape of each input.

    Every profile allows up to `max_batch_size` rows, because Triton compares that with the configuration.

    Args:
        profile: The profile to convert.
        max_batch_size: The largest number of rows, as in the model's configuration.
        num_mels: The mel bands of the features; None for a waveform.
        hop_samples: The samples from one frame of features to the next; 1 for a waveform.
    """
    channels, axes = (1, 1) if num_mels is None else (num_mels, 2)
    rate = SAMPLE_RATE_HZ / hop_samples
    row = round(profile.seconds * rate) * channels
    # A clip has one frame more than hops.
    most = (round(profile.most_s * rate) + max_batch_size) * channels
    rows = (1, profile.rows, max_batch_size)
    shapes: tuple[list[tuple[int, ...]], ...] = (
        [(channels,), (profile.rows * row,), (most,)],
        [(n, axes) for n in rows],
        [(n, 1) for n in rows],
        [(n,) for n in rows],
        [(channels,), (row,), (most,)],
    )
    return dict(zip(SHAPED_INPUTS, shapes, strict=True))
