"""The features of wav2vec 2.0 as a DALI graph: the waveform itself, normalised if the settings say so.

Input: mono float waveforms at 16 kHz. Output: [samples] float32. Like `features.py`, this file is copied into the model
repository as ``<model>_features/1/dali.py``, so it needs only DALI.
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
SETTINGS_FILE = "features.json"  # beside this file in the model repository: "max_audio_s" and WaveformSettings
# DALI 1.42, in Triton 24.10, has no `DataNode.shape`; from 1.44 on, the operator is deprecated.
shape_of = DataNode.shape if hasattr(DataNode, "shape") else fn.shapes


@dataclass(frozen=True, kw_only=True)
class WaveformSettings:
    """The settings of waveform features; they differ between checkpoints."""

    name: Literal["waveform"] = "waveform"
    normalise: bool = True
    """Whether each clip is normalised to mean 0 and variance 1. fairseq's Base was trained without."""
    variance_guard: float = 1e-7
    """The value added to the variance before its square root divides: 1e-7 in `transformers`, 1e-5 in fairseq."""

    hop_samples = 1

    def __post_init__(self) -> None:
        if not 0 < self.variance_guard < math.inf:
            raise ValueError(f"`variance_guard` must be positive and finite, but is {self.variance_guard}")


def waveform(signal: DataNode, settings: WaveformSettings) -> DataNode:
    """Build the graph: [samples] float32 with at least one sample -> [samples] float32."""
    if not settings.normalise:
        return signal
    return fn.normalize(signal, epsilon=settings.variance_guard)


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def serve() -> tuple[DataNode, DataNode]:
    """Build the `<model>_features` stage: SIGNAL, SIGNAL_LENGTH -> FEATURES, FEATURE_LENGTH.

    The stage is total: it accepts every float input of every length. FEATURES has the length of the row's whole tensor,
    which is equal within a request, as Triton requires; it is zero past the clip's own end. A tensor over the limit
    gives a single sample, so that a refused clip costs almost nothing in later stages. FEATURE_LENGTH is SIGNAL_LENGTH,
    or 0 if that is negative.
    """
    content = json.loads(Path(__file__).with_name(SETTINGS_FILE).read_text())
    limit = round(content.pop("max_audio_s") * SAMPLE_RATE_HZ)
    settings = WaveformSettings(**content)
    signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
    length = fn.external_source(name="SIGNAL_LENGTH", dtype=types.INT32, ndim=1)

    samples = shape_of(signal, dtype=types.INT32)
    samples = graph_math.max(samples * (samples <= limit), 1)
    kept = graph_math.clamp(length, 1, samples)
    clip = fn.slice(signal, start=0, shape=kept, axes=[0], out_of_bounds_policy="pad")
    features = fn.pad(waveform(clip, settings), axes=[0], shape=samples)
    return features, fn.cast(length * (length > 0), dtype=types.INT32)
