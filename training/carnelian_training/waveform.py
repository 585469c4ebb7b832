"""The features of wav2vec 2.0: the waveform itself, normalised if the checkpoint asks for it, as a DALI graph.

In: mono float waveforms at 16 kHz. Out: [samples] float32. As `features.py`, it is copied into the model repository as
``<model>_features/1/dali.py``, so it needs nothing but DALI.
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
    """What differs between checkpoints."""

    name: Literal["waveform"] = "waveform"
    normalise: bool = True
    """To mean 0 and variance 1 over the clip. Base of fairseq was trained without."""
    variance_guard: float = 1e-7
    """Added to the variance before its root divides: `transformers`' value; fairseq's is 1e-5."""

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
    """The `<model>_features` stage: SIGNAL, SIGNAL_LENGTH -> FEATURES, FEATURE_LENGTH.

    It is total: every float input of every length passes. FEATURES is as long as the row's tensor, equal within a
    request as Triton requires, zero past the clip's own end, and a single sample of a tensor over the limit, so that a
    refused clip costs nothing downstream. FEATURE_LENGTH is SIGNAL_LENGTH, 0 where that is negative.
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
