"""Log-mel features, defined once, as a DALI graph: training reads its batches through it and serving ships this file.

In: mono float waveforms at 16 kHz. Out: [mels, frames] float32, mean 0 and variance 1 per mel band over the clip; as
the defaults are, 64 bands and ``frames = samples // 160 + 1``. The values equal a plain ``torch.stft`` reference
within 1e-4.

`carnelian-export` copies this file, as it is, to ``<model>_features/1/dali.py``; Triton's DALI backend finds
:func:`serve` there. So it needs nothing but DALI.
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
# DALI 1.42, in Triton 24.10, has no `DataNode.shape`; from 1.44 on, the operator is deprecated.
shape_of = DataNode.shape if hasattr(DataNode, "shape") else fn.shapes


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What differs between models. A checkpoint of another toolkit brings its own (docs/checkpoints.md)."""

    window_samples: int = 320
    """A Hann window, symmetric as the published checkpoints were trained with; 20 ms."""
    hop_samples: int = 160
    fft_size: int = 512
    num_mels: int = 64
    low_hz: float = 0.0
    high_hz: float = SAMPLE_RATE_HZ / 2
    preemphasis: float = 0.97
    magnitude_power: Literal[1, 2] = 2
    """Of the spectrum, before the mel filters."""
    log_guard: float = 2.0**-24
    """Keeps the logarithm of the mel energies finite."""
    log_guard_by: Literal["add", "clamp"] = "add"
    std_guard: float = 0.0
    """Added to each band's standard deviation before it divides; without it, a constant band is 0."""
    edges: Literal["reflect", "zero"] = "reflect"
    """What the windows at both ends of a clip see beyond it."""
    frame_count: Literal["floor + 1", "ceil", "floor"] = "floor + 1"
    """Frames of n samples: that of n / hop, and at least 1."""

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
        """How many frames a clip of no fewer than 0 samples has: int32 -> int32."""
        # Nothing is added before the division: the greatest length that a caller can claim would overflow. And nothing
        # that needs no doing: each operator costs as much as some thousand samples.
        if self.frame_count == "floor + 1":
            return samples // self.hop_samples + 1
        if self.frame_count == "ceil":
            return graph_math.max((samples - 1) // self.hop_samples + 1, 1)
        return graph_math.max(samples // self.hop_samples, 1)


def hann(size: int) -> list[float]:
    """A symmetric Hann window."""
    return [0.5 - 0.5 * math.cos(2 * math.pi * n / (size - 1)) for n in range(size)]


def log_mel(signal: DataNode, settings: FeatureSettings) -> DataNode:
    """Build the feature graph: [samples] float32 with at least one sample -> [num_mels, frames] float32."""
    emphasised = signal
    if settings.preemphasis:
        emphasised = fn.preemphasis_filter(signal, preemph_coeff=settings.preemphasis, border="zero")
    # An odd window gets a zero at its end, or DALI would centre it one sample later than PyTorch does.
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
        layout="tf",  # each window's samples side by side: the other way, the longest step takes half as long again
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
    if settings.frame_count != "floor + 1":  # what the spectrogram makes
        energy = fn.slice(energy, start=0, shape=settings.frames(shape_of(signal, dtype=types.INT32)), axes=[1])
    if not settings.std_guard:
        return fn.normalize(energy, axes=[1], ddof=1)
    centred = energy - fn.reductions.mean(energy, axes=[1], keep_dims=True)
    # Counted on the data's own device: a tensor of shapes is always on the CPU.
    count = fn.reductions.sum(centred * 0.0 + 1.0, axes=[1], keep_dims=True)
    variance = fn.reductions.sum(centred * centred, axes=[1], keep_dims=True) / graph_math.max(count - 1.0, 1.0)
    return centred / (graph_math.sqrt(variance) + settings.std_guard)


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def serve() -> tuple[DataNode, DataNode]:
    """The `<model>_features` stage: SIGNAL, SIGNAL_LENGTH -> FEATURES, FEATURE_LENGTH.

    It is total: every float input of every length passes. FEATURES has as many frames as the row's tensor, equal
    within a request as Triton requires; frames past the clip's own end are zero. FEATURE_LENGTH is computed from
    SIGNAL_LENGTH alone, 0 where there are no samples; where it exceeds the frames of FEATURES, the decoder refuses
    the clip. A tensor over the limit yields a single frame, so that a refused clip costs nothing downstream.
    """
    content = json.loads(Path(__file__).with_name(SETTINGS_FILE).read_text())
    limit = round(content.pop("max_audio_s") * SAMPLE_RATE_HZ)
    settings = FeatureSettings(**content)
    signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
    length = fn.external_source(name="SIGNAL_LENGTH", dtype=types.INT32, ndim=1)

    samples = shape_of(signal, dtype=types.INT32)
    samples = samples * (samples <= limit)
    kept = graph_math.clamp(length, 1, graph_math.max(samples, 1))
    # Empty signals get one sample: the pre-emphasis operator crashes on none. Slicing before framing lets the
    # reflection at the end see the clip's true end.
    clip = fn.slice(signal, start=0, shape=kept, axes=[0], out_of_bounds_policy="pad")
    features = fn.pad(log_mel(clip, settings), axes=[1], shape=settings.frames(samples))
    return features, settings.frames(length) * (length > 0)
