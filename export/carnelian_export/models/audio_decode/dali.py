"""Encoded bytes -> 16 kHz mono samples: one WAV, FLAC, Ogg Vorbis or Opus file of any rate and channels.

In: AUDIO uint8 [bytes]. Out: SIGNAL float32 [samples], at least one, and SIGNAL_LENGTH int32 [1].
"""

from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.pipeline import DataNode
from nvidia.dali.plugin.triton import autoserialize

SAMPLE_RATE_HZ = 16_000
MAX_AUDIO_S = 60


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)
def decode() -> tuple[DataNode, DataNode]:
    """Build the graph.

    SIGNAL_LENGTH is always the clip's own length. Of a clip over the limit SIGNAL holds a sample or two, cut
    off before the resampling: an hour costs its decoding and no more. The last stage words the error.
    """
    audio = fn.external_source(name="AUDIO", dtype=types.UINT8, ndim=1)
    clip, rate_hz = fn.decoders.audio(audio, dtype=types.FLOAT, downmix=True)
    samples = clip.shape(dtype=types.INT64)
    rate = fn.cast(rate_hz, dtype=types.INT64)
    length = (samples * SAMPLE_RATE_HZ + rate - 1) // rate  # rounded up, as audio_resample does

    is_short = length <= MAX_AUDIO_S * SAMPLE_RATE_HZ
    kept = fn.cast(math.min(samples, 1 + samples * is_short), dtype=types.INT32)
    clip = fn.pad(fn.slice(clip, start=0, shape=kept, axes=[0]), axes=[0], shape=[1])
    # Resampling to the same rate costs more than decoding. DALI makes a graph of statements, not of a ternary.
    if rate_hz != SAMPLE_RATE_HZ:  # noqa: SIM108
        signal = fn.audio_resample(clip, in_rate=rate_hz, out_rate=SAMPLE_RATE_HZ)
    else:
        signal = clip
    return signal, fn.cast(length, dtype=types.INT32)
