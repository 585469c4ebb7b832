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
READ, UNCOUNTED = 1, 2
"""Kinds of heads. libsndfile has parsers of some twenty other formats, which nobody needs here, and of which one writes
what a file holds to the standard output: files of another kind are not given to it."""
BITS_OF_TYPE = [1 << bit for bit in range(7)]
HEADS = [
    (READ, b"RIFF\0\0\0\0WAVE", b"\xff\xff\xff\xff\0\0\0\0\xff\xff\xff\xff"),
    (READ, b"OggS", b"\xff" * 4),
    (READ, b"fLaC", b"\xff" * 4),
    (UNCOUNTED, b"fLaC", b"\xff" * 4 + b"\0" * 17 + b"\x0f" + b"\xff" * 4),
    (UNCOUNTED, b"ID3", b"\xff" * 3),
    *((UNCOUNTED, bytes([*b"fLaC", bit]), bytes([*b"\xff" * 4, bit])) for bit in BITS_OF_TYPE),
]
"""Kind, magic number and mask: of FLAC also with the 36 bits in which it counts its samples, or with a bit of its first
block's type. The greatest kind of those that fit holds."""
KINDS, MAGIC, MASKS = zip(*HEADS, strict=True)
NO_SOUND = b"neither WAV nor FLAC nor Ogg"
"""What is decoded in the place of other files, in vain."""


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)
def decode() -> tuple[DataNode, DataNode]:
    """Build the graph.

    SIGNAL_LENGTH is always the clip's own length, or UNKNOWN_LENGTH. A clip over the limit is cut to a sample or two
    before the resampling, so that an hour of audio costs no more than its decoding. The last stage reports the error.
    """
    audio = fn.external_source(name="AUDIO", dtype=types.UINT8, ndim=1)
    head = fn.slice(audio, start=0, shape=HEAD_BYTES, axes=[0], out_of_bounds_policy="pad")
    magic, mask = (
        types.Constant(
            [byte for row in rows for byte in row.ljust(HEAD_BYTES, b"\0")],
            dtype=types.UINT8,
            shape=(len(rows), HEAD_BYTES),
            device="cpu",
        )
        for rows in (MAGIC, MASKS)
    )
    fits = fn.reductions.max((head ^ magic) & mask, axes=[1]) == 0
    kind = fn.reductions.max(fits * types.Constant(list(KINDS), dtype=types.UINT8, device="cpu"))
    if kind == UNCOUNTED:
        signal = types.Constant([0.0], device="cpu")
        length = types.Constant([UNKNOWN_LENGTH], dtype=types.INT32, device="cpu")
    else:
        if kind == READ:  # noqa: SIM108  (a ternary operator is nothing that a graph has)
            encoded = audio
        else:
            encoded = types.Constant(list(NO_SOUND), dtype=types.UINT8, device="cpu")
        clip, rate_hz = fn.decoders.audio(encoded, dtype=types.FLOAT, downmix=True)
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
