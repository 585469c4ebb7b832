"""Log-mel features as a DALI graph, the one definition for training and serving.

Input: mono float waveforms at 16 kHz. Output: [mels, frames] float32 with mean 0 and variance 1 per mel band over the
clip; by default 64 bands and ``frames = samples // 160 + 1``. The values equal those of a plain ``torch.stft``
reference within 1e-4, and within 0.06 in bands of which nothing is heard.

`carnelian-export` copies this file unchanged to ``<model>_features/1/dali.py``, where Triton's DALI backend finds
:func:`serve`. So it needs only DALI.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as graph_math
from nvidia.dali.pipeline import DataNode
from nvidia.dali.plugin.triton import autoserialize

SAMPLE_RATE_HZ = 16_000
SETTINGS_FILE = "features.json"  # beside this file in the model repository: "max_audio_s" and FeatureSettings
VARIANCE_GUARD = 1e-8
"""The value added to each band's variance where `std_guard` is 0. Bands of which nothing is heard, as all of digital
silence or the upper half of telephone speech, vary by less than float32 rounding (2e-6), which must not become 1."""
# DALI 1.42, in Triton 24.10, has no `DataNode.shape`; from 1.44 on, the operator is deprecated.
shape_of = DataNode.shape if hasattr(DataNode, "shape") else fn.shapes


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """The settings of the features. Checkpoints of other toolkits have their own (docs/checkpoints.md)."""

    window_samples: int = 320
    """The length of the Hann window; by default 20 ms. It is symmetric, as in training of the published checkpoints."""
    hop_samples: int = 160
    """The number of samples from one frame to the next; by default 10 ms."""
    fft_size: int = 512
    """The length of the FFT in samples; even, and at least `window_samples`."""
    num_mels: int = 64
    """The number of mel bands."""
    low_hz: float = 0.0
    """The lower end of the lowest mel band, in Hz."""
    high_hz: float = SAMPLE_RATE_HZ / 2
    """The upper end of the highest mel band, in Hz."""
    preemphasis: float = 0.97
    """The coefficient of the pre-emphasis filter, 0 to 1; 0: no filter."""
    magnitude_power: Literal[1, 2] = 2
    """The power of the magnitude spectrum before the mel filters: 1 for magnitudes, 2 for energies."""
    log_guard: float = 2.0**-24
    """The small value that keeps the logarithm of the mel energies finite."""
    log_guard_by: Literal["add", "clamp"] = "add"
    """How `log_guard` is applied: added to the mel energies, or as their least value."""
    std_guard: float = 0.0
    """The value added to each band's standard deviation before division. With 0, :data:`VARIANCE_GUARD` is added to the
    variance, so that a constant band becomes 0, within 0.06."""
    edges: Literal["reflect", "zero"] = "reflect"
    """The padding that windows at both ends of a clip see: the reflected signal, or zeros."""
    frame_count: Literal["floor + 1", "ceil", "floor"] = "floor + 1"
    """The number of frames of n samples: floor(n / hop) + 1, ceil(n / hop) or floor(n / hop), and at least 1."""

    def __post_init__(self) -> None:
        for name in ("window_samples", "hop_samples", "fft_size", "num_mels", "log_guard"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be positive and finite, but is {getattr(self, name)}")
        for name in ("preemphasis", "std_guard"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be finite and at least 0, but is {getattr(self, name)}")
        for name in ("preemphasis", "log_guard"):
            if getattr(self, name) > 1:
                raise ValueError(f"`{name}` must be at most 1, but is {getattr(self, name)}")
        if self.window_samples < 2:
            raise ValueError(f"`window_samples` must be at least 2, but is {self.window_samples}")
        if self.fft_size < self.window_samples or self.fft_size % 2:
            raise ValueError(
                f"`fft_size` must be even and at least `window_samples`, {self.window_samples}, but is {self.fft_size}"
            )
        if not 0 <= self.low_hz < self.high_hz <= SAMPLE_RATE_HZ / 2:
            raise ValueError(
                f"`low_hz` to `high_hz` must be a range within 0 to {SAMPLE_RATE_HZ / 2:g}, "
                f"but is {self.low_hz:g} to {self.high_hz:g}"
            )

    def frames(self, samples: DataNode) -> DataNode:
        """Return the number of frames of a clip of `samples` samples, at least 0: int32 -> int32."""
        # No addition before the division, because the largest length that a caller can claim would overflow. As few
        # operators as possible, because each costs as much as a few thousand samples.
        if self.frame_count == "floor + 1":
            return samples // self.hop_samples + 1
        if self.frame_count == "ceil":
            return graph_math.max((samples - 1) // self.hop_samples + 1, 1)
        return graph_math.max(samples // self.hop_samples, 1)


def hann(size: int) -> list[float]:
    """Return a symmetric Hann window of `size` samples."""
    return [0.5 - 0.5 * math.cos(2 * math.pi * n / (size - 1)) for n in range(size)]


def log_mel(signal: DataNode, settings: FeatureSettings) -> DataNode:
    """Build the feature graph: [samples] float32 with at least one sample -> [num_mels, frames] float32."""
    emphasised = signal
    if settings.preemphasis:
        emphasised = fn.preemphasis_filter(signal, preemph_coeff=settings.preemphasis, border="zero")
    # An odd window gets a zero at its end; without it, DALI would centre the window one sample later than PyTorch.
    window = hann(settings.window_samples) + [0.0] * (settings.window_samples % 2)
    power = fn.spectrogram(
        emphasised,
        nfft=settings.fft_size,
        window_length=len(window),
        window_step=settings.hop_samples,
        window_fn=window,
        center_windows=True,
        reflect_padding=settings.edges == "reflect",
        power=settings.magnitude_power,
        layout="tf",  # frames first; the other layout makes the slowest step take 1.5 times as long
    )
    mel = fn.mel_filter_bank(
        power,
        sample_rate=SAMPLE_RATE_HZ,
        nfilter=settings.num_mels,
        freq_low=settings.low_hz,
        freq_high=settings.high_hz,
        normalize=True,
        mel_formula="slaney",
    )
    mel = fn.transpose(mel, perm=[1, 0])  # [frames, num_mels] -> [num_mels, frames]
    guard = settings.log_guard
    energy = graph_math.log(mel + guard if settings.log_guard_by == "add" else graph_math.max(mel, guard))
    if settings.frame_count != "floor + 1":  # the spectrogram already has this number
        energy = fn.slice(energy, start=0, shape=settings.frames(shape_of(signal, dtype=types.INT32)), axes=[1])
    if not settings.std_guard:
        return fn.normalize(energy, axes=[1], ddof=1, epsilon=VARIANCE_GUARD)
    centred = energy - fn.reductions.mean(energy, axes=[1], keep_dims=True)
    # The frames are counted by a sum on the data's own device, because a tensor of shapes is always on the CPU.
    count = fn.reductions.sum(centred * 0.0 + 1.0, axes=[1], keep_dims=True)
    variance = fn.reductions.sum(centred * centred, axes=[1], keep_dims=True) / graph_math.max(count - 1.0, 1.0)
    return centred / (graph_math.sqrt(variance) + settings.std_guard)


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def serve() -> tuple[DataNode, DataNode]:
    """Build the `<model>_features` stage: SIGNAL, SIGNAL_LENGTH -> FEATURES, FEATURE_LENGTH.

    The stage is total: it accepts every float input of every length. FEATURES has the number of frames of the row's
    whole tensor, which is equal within a request, as Triton requires; frames past the clip's own end are zero.
    FEATURE_LENGTH is computed only from SIGNAL_LENGTH and is 0 without samples; if it exceeds the frames of FEATURES,
    the decoder refuses the clip. A tensor over the limit gives a single frame, so that a refused clip costs almost
    nothing in later stages.
    """
    content = json.loads(Path(__file__).with_name(SETTINGS_FILE).read_text())
    limit = round(content.pop("max_audio_s") * SAMPLE_RATE_HZ)
    settings = FeatureSettings(**content)
    signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
    length = fn.external_source(name="SIGNAL_LENGTH", dtype=types.INT32, ndim=1)

    samples = shape_of(signal, dtype=types.INT32)
    samples = samples * (samples <= limit)
    kept = graph_math.clamp(length, 1, graph_math.max(samples, 1))
    # Empty signals get one sample, because the pre-emphasis operator crashes without any. Slicing before framing puts
    # the reflection at the clip's true end.
    clip = fn.slice(signal, start=0, shape=kept, axes=[0], out_of_bounds_policy="pad")
    features = fn.pad(log_mel(clip, settings), axes=[1], shape=settings.frames(samples))
    return features, settings.frames(length) * (length > 0)
