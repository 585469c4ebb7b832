"""Log-mel features, defined once, as a DALI graph: training reads its batches through it and serving ships this file.

In: mono float waveforms at 16 kHz. Out: [64, frames] float32, mean 0 and variance 1 per mel band over the clip,
``frames = samples // 160 + 1``. The values equal a plain ``torch.stft`` reference within 1e-4.

`carnelian-export` copies this file, as it is, to ``<model>_features/1/dali.py``; Triton's DALI backend finds
:func:`serve` there. So it needs nothing but DALI.
"""

import json
import math
from pathlib import Path

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as graph_math
from nvidia.dali.pipeline import DataNode
from nvidia.dali.plugin.triton import autoserialize

SAMPLE_RATE_HZ = 16_000
WINDOW_SAMPLES = 320  # 20 ms
HOP_SAMPLES = 160  # 10 ms
FFT_SIZE = 512
NUM_MELS = 64
PREEMPHASIS = 0.97
LOG_GUARD = 2.0**-24  # added to the mel energies before the logarithm, as NeMo does
SETTINGS_FILE = "features.json"  # beside this file in the model repository: {"max_audio_s"}

# Symmetric, as the published checkpoints were trained with.
HANN = [0.5 - 0.5 * math.cos(2 * math.pi * n / (WINDOW_SAMPLES - 1)) for n in range(WINDOW_SAMPLES)]


def log_mel(signal: DataNode) -> DataNode:
    """Build the feature graph: [samples] float32 with at least one sample -> [64, samples // 160 + 1] float32."""
    emphasised = fn.preemphasis_filter(signal, preemph_coeff=PREEMPHASIS, border="zero")
    power = fn.spectrogram(
        emphasised,
        nfft=FFT_SIZE,
        window_length=WINDOW_SAMPLES,
        window_step=HOP_SAMPLES,
        window_fn=HANN,
        center_windows=True,
        reflect_padding=True,
    )
    mel = fn.mel_filter_bank(
        power,
        sample_rate=SAMPLE_RATE_HZ,
        nfilter=NUM_MELS,
        freq_low=0.0,
        freq_high=SAMPLE_RATE_HZ / 2,
        normalize=True,
        mel_formula="slaney",
    )
    return fn.normalize(graph_math.log(mel + LOG_GUARD), axes=[1], ddof=1)


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def serve() -> tuple[DataNode, DataNode]:
    """The `<model>_features` stage: SIGNAL, SIGNAL_LENGTH -> FEATURES, FEATURE_LENGTH.

    It is total: every float input of every length passes. FEATURES has as many frames as the row's tensor, equal
    within a request as Triton requires; frames past the clip's own end are zero. FEATURE_LENGTH is computed from
    SIGNAL_LENGTH alone, 0 where there are no samples; where it exceeds the frames of FEATURES, the decoder refuses
    the clip. A tensor over the limit yields a single frame, so that a refused clip costs nothing downstream.
    """
    settings = json.loads(Path(__file__).with_name(SETTINGS_FILE).read_text())
    limit = round(settings["max_audio_s"] * SAMPLE_RATE_HZ)
    signal = fn.external_source(name="SIGNAL", dtype=types.FLOAT, ndim=1)
    length = fn.external_source(name="SIGNAL_LENGTH", dtype=types.INT32, ndim=1)

    samples = signal.shape(dtype=types.INT32)
    samples = samples * (samples <= limit)
    kept = graph_math.clamp(length, 1, graph_math.max(samples, 1))
    # Empty signals get one sample: the pre-emphasis operator crashes on none. Slicing before framing lets the
    # reflection at the end see the clip's true end.
    clip = fn.slice(fn.pad(signal, axes=[0], shape=[1]), start=0, shape=kept, axes=[0])
    features = fn.pad(log_mel(clip), axes=[1], shape=samples // HOP_SAMPLES + 1)
    feature_length = (length // HOP_SAMPLES + 1) * (length > 0)
    return features, fn.cast(feature_length, dtype=types.INT32)
