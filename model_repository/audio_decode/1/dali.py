"""Encoded bytes -> 16 kHz mono samples: one WAV, FLAC, Ogg Vorbis or Opus file of any rate and channels.

In: AUDIO uint8 [bytes]. Out: SIGNAL float32 [samples], at least one, and SIGNAL_LENGTH int32 [1].
"""

from math import pi
from typing import Any

from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.pipeline import DataNode
from nvidia.dali.plugin.triton import autoserialize

# DALI 1.42, in Triton 24.10, has no `DataNode.shape`; from 1.44 on, the operator is deprecated.
shape_of = DataNode.shape if hasattr(DataNode, "shape") else fn.shapes

SAMPLE_RATE_HZ = 16_000
MAX_AUDIO_S = 60
UNKNOWN_LENGTH = 2**31 - 1
"""SIGNAL_LENGTH of a file that does not say how many samples it has: FLAC that was written to a pipe, and Ogg files one
behind the other.

libsndfile makes 2^63 - 1 of their counts, and the operator (DALI 2.4) then decodes into too little memory, which ends
the server, then or later. So such a file is not decoded, and the last stage says why. The same goes for a file whose
count is hidden, behind an ID3v2 tag or behind another block than STREAMINFO (type 0), and for Ogg that claims 2^48
samples.
"""
HEAD_BYTES = 44
READ, UNCOUNTED, OGG, PLAIN_OGG = 1, 2, 3, 4
"""Kinds of heads. libsndfile has parsers of some twenty other formats, which nobody needs here, and of which one writes
what a file holds to the standard output: files of another kind are not given to it."""
PLAIN_OPUS_HZ = (16_000, 44_100, 48_000)
"""The rates in an Opus header that are safe. At others libsndfile may decode at 12 or 24 kHz, and then reports some
2^62 or 2^63 samples if the last page ends before the first one."""
FIRST_PAGE = b"OggS\0\2" + bytes(20) + b"\1\0", b"\xff" * 6 + bytes(20) + b"\xff\0"
"""The first page of an Ogg stream, and its mask: it begins the stream, with one packet of less than 255 bytes."""
BITS_OF_TYPE = [1 << bit for bit in range(7)]
HEADS = [
    (READ, b"RIFF\0\0\0\0WAVE", b"\xff\xff\xff\xff\0\0\0\0\xff\xff\xff\xff"),
    (OGG, b"OggS", b"\xff" * 4),
    (PLAIN_OGG, FIRST_PAGE[0] + b"\1vorbis", FIRST_PAGE[1] + b"\xff" * 7),
    *(
        (
            PLAIN_OGG,
            FIRST_PAGE[0] + b"OpusHead" + bytes(4) + rate.to_bytes(4, "little"),
            FIRST_PAGE[1] + b"\xff" * 8 + bytes(4) + b"\xff" * 4,
        )
        for rate in PLAIN_OPUS_HZ
    ),
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
REACH = 48
"""Half of the filter's length, in samples of the output."""
LONGEST_REACH = 32 * REACH
"""The same in samples of the recording, at most: up to 512 kHz the filter has its full length."""
# From DALI 2 on, the operator is no longer experimental, and warns under its old name.
filter_of = fn.filter if hasattr(fn, "filter") else fn.experimental.filter  # type: ignore[attr-defined]  # no stub


def says_its_length(audio: DataNode, head: DataNode) -> DataNode:
    """Return whether libsndfile is sure to find the length of an Ogg file, and it is below 2^48 samples.

    Each page ("OggS") counts the samples up to its end, in eight bytes; all ones mean that no packet ends on it.
    libsndfile subtracts the first count from the last one that it finds among the last pages, in the file's first
    stream. So everything that looks like a page must belong to the first page's stream and have a count, and only the
    first may begin a stream. This refuses comments longer than a page, such as pictures, and, by chance, one in 10,000
    files of 400 KB.
    """
    size = math.max(shape_of(audio, dtype=types.INT32) - 26, 1)  # a page has 27 bytes or more, but the file may be cut
    byte = {
        place: fn.slice(audio, start=place, shape=size, axes=[0], out_of_bounds_policy="pad")
        for place in (*range(4), 5, *range(12, 18))
    }
    is_page = (byte[0] == 0x4F) & (byte[1] == 0x67) & (byte[2] == 0x67) & (byte[3] == 0x53)
    serial = (byte[14] ^ head[14]) | (byte[15] ^ head[15]) | (byte[16] ^ head[16]) | (byte[17] ^ head[17])
    bad, begins = (
        fn.reductions.sum(fn.cast(pages, dtype=types.INT32))
        for pages in (is_page & ((serial | byte[12] | byte[13]) > 0), is_page & ((byte[5] & 2) > 0))
    )
    return (bad == 0) & (begins < 2)


def low_pass(signal: DataNode, rate_hz: Any, output_hz: Any) -> DataNode:
    """Add to a DALI graph the filter against aliasing that `fn.audio_resample` lacks.

    Without it, what a recording at 48 kHz has at 11 kHz is heard at 5 kHz, as loud as it was. This is a windowed sinc:
    a filter that passes all up to 0.9 of half of `output_hz` (-0.1 dB), and of what lies above 1.02 of it nothing
    (-75 dB). A recording at `output_hz` or a lower rate stays as it is.
    """
    step = math.min(output_hz / rate_hz, 1.0)
    needed = fn.cast(math.min(REACH / step, LONGEST_REACH) * (step < 1.0), dtype=types.INT32)
    reach = fn.reshape(needed, shape=[1])  # DALI 1 slices by no scalars
    # Not quite whole numbers, as sin(x) / x has no value at 0.
    places = types.Constant([i + 1e-3 for i in range(-LONGEST_REACH, LONGEST_REACH + 1)], device="cpu")
    place = fn.slice(places, start=LONGEST_REACH - reach, shape=2 * reach + 1, axes=[0])
    x, turn = place * step * (0.94 * pi), place * (pi / (reach + 1))
    taps = math.sin(x) / x * (0.42 + 0.5 * math.cos(turn) + 0.08 * math.cos(2 * turn))  # Blackman's window
    image, taps = (fn.expand_dims(row, axes=[0]) for row in (signal, taps / fn.reductions.sum(taps)))
    return fn.squeeze(filter_of(image, taps), axes=[0])


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
    if kind >= OGG:  # noqa: SIM108  (a ternary operator is nothing that a graph has)
        is_counted = says_its_length(audio, head)
    else:
        is_counted = kind != UNCOUNTED
    if not is_counted:
        signal = types.Constant([0.0], device="cpu")
        length = types.Constant([UNKNOWN_LENGTH], dtype=types.INT32, device="cpu")
    else:
        if kind == OGG:
            # Resampling inside the operator needs more memory: for 2^62 or 2^63 samples so much that it fails cleanly.
            # It lacks the filter, so at this rate what it folds down from 48 kHz lies above what is heard in the end.
            clip, rate_hz = fn.decoders.audio(audio, dtype=types.FLOAT, downmix=True, sample_rate=2 * SAMPLE_RATE_HZ)
        else:
            if kind > 0:  # noqa: SIM108
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
            heard = low_pass(kept, rate_hz, SAMPLE_RATE_HZ)
            signal = fn.audio_resample(heard, in_rate=rate_hz, out_rate=SAMPLE_RATE_HZ)
            length = fn.cast(resampled, dtype=types.INT32)
    return signal, length
