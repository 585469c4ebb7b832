"""Encoded bytes -> 16 kHz mono samples: one WAV, FLAC, Ogg Vorbis or Opus file of any rate and channels.

In: AUDIO uint8 [bytes]. Out: SIGNAL float32 [samples], at least one, and SIGNAL_LENGTH int32 [1].
"""

from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.pipeline import DataNode
from nvidia.dali.plugin.triton import autoserialize

# DALI 1.42, in Triton 24.10, has no `DataNode.shape`; from 1.44 on, the operator is deprecated.
shape_of = DataNode.shape if hasattr(DataNode, "shape") else fn.shapes

SAMPLE_RATE_HZ = 16_000
MAX_AUDIO_S = 60
UNKNOWN_LENGTH = 2**31 - 1
"""SIGNAL_LENGTH of a FLAC file that does not say how many samples it has, because it was written to a pipe.

libsndfile makes 2^63 - 1 of the count that such a file has, 0, and the operator (DALI 2.4) then decodes into too little
memory, which ends the server. So the file is not decoded, and the last stage says why. Nor is a file whose count is
hidden: behind an ID3v2 tag, or behind another block than STREAMINFO, whose type is 0.
"""
HEAD_BYTES = 26
BITS_OF_TYPE = [1 << bit for bit in range(7)]
REFUSED_HEADS = [
    b"fLaC",
    b"ID3",
    *(bytes([*b"fLaC", bit]) for bit in BITS_OF_TYPE),
]
REFUSED_HEADS_MASKS = [
    b"\xff" * 4 + b"\0" * 17 + b"\x0f" + b"\xff" * 4,
    b"\xff" * 3,
    *(bytes([*b"\xff" * 4, bit]) for bit in BITS_OF_TYPE),
]
"""Their magic numbers with the 36 bits in which FLAC counts its samples, or with a bit of its first block's type."""


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)
def decode() -> tuple[DataNode, DataNode]:
    """Build the graph.

    SIGNAL_LENGTH is always the clip's own length, or UNKNOWN_LENGTH. A clip over the limit is cut to a sample or two
    before the resampling, so that an hour of audio costs no more than its decoding. The last stage reports the error.
    """
    audio = fn.external_source(name="AUDIO", dtype=types.UINT8, ndim=1)
    head = fn.slice(audio, start=0, shape=HEAD_BYTES, axes=[0], out_of_bounds_policy="pad")
    refused, mask = (
        types.Constant(
            [byte for head in heads for byte in head.ljust(HEAD_BYTES, b"\0")],
            dtype=types.UINT8,
            shape=(len(heads), HEAD_BYTES),
            device="cpu",
        )
        for heads in (REFUSED_HEADS, REFUSED_HEADS_MASKS)
    )
    if fn.reductions.min(fn.reductions.max((head ^ refused) & mask, axes=[1])) == 0:
        signal = types.Constant([0.0], device="cpu")
        length = types.Constant([UNKNOWN_LENGTH], dtype=types.INT32, device="cpu")
    else:
        clip, rate_hz = fn.decoders.audio(audio, dtype=types.FLOAT, downmix=True)
        size = shape_of(clip, dtype=types.INT32)
        samples = size[0]
        # Most files have this rate and need nothing: every further operator costs time, and resampling them to the
        # rate that they have would cost more than decoding them.
        if (rate_hz == SAMPLE_RATE_HZ) & (samples > 0) & (samples <= MAX_AUDIO_S * SAMPLE_RATE_HZ):
            signal, length = clip, size
        else:
            rate = fn.cast(rate_hz, dtype=types.INT64)
            # Rounded up, as audio_resample does.
            resampled = (fn.cast(size, dtype=types.INT64) * SAMPLE_RATE_HZ + rate - 1) // rate
            is_short = resampled <= MAX_AUDIO_S * SAMPLE_RATE_HZ
            kept = fn.slice(clip, start=0, shape=math.max(size * is_short, 1), axes=[0], out_of_bounds_policy="pad")
            signal = fn.audio_resample(kept, in_rate=rate_hz, out_rate=SAMPLE_RATE_HZ)
            length = fn.cast(resampled, dtype=types.INT32)
    return signal, length
